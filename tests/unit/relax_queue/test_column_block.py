"""Column blocks: what was put in comes out, as views, and other bytes are refused."""

import hypothesis.extra.numpy as npst
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from relax_queue.rows.column_block import DTYPES, SCOPES, BlockError, Column, decode, encode, ragged, take

ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4))
)


def offsets_for(values: np.ndarray, cuts: list[int]) -> np.ndarray:
    inner = sorted(c % (len(values) + 1) for c in cuts)
    return np.array([0, *inner, len(values)], np.int64)


@settings(max_examples=40, deadline=None)
@given(
    columns=st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=12),
        st.tuples(st.sampled_from(SCOPES), ARRAYS, st.none() | st.lists(st.integers(0, 9), max_size=4), st.booleans()),
        max_size=5,
    )
)
def test_a_block_gives_back_what_was_put_in(columns: dict) -> None:  # type: ignore[type-arg]
    made = {}
    for name, (scope, values, cuts, transposed) in columns.items():
        offsets = None if cuts is None else offsets_for(values, cuts)
        made[name] = Column(scope, values, offsets, transposed and cuts is not None)
    block = encode(made)
    got = decode(block)
    assert list(got) == list(made)
    for name, column in made.items():
        assert got[name].scope == column.scope
        assert got[name].values.dtype == column.values.dtype
        assert got[name].units == column.units
        for i in range(column.units):
            assert got[name].unit(i).tobytes() == column.unit(i).tobytes()
            assert got[name].unit(i).shape == column.unit(i).shape


def test_decoded_columns_are_aligned_read_only_views() -> None:
    block = encode(
        {"a": Column("row", np.arange(5, dtype=np.float32)), "b": ragged("row", [np.arange(3), np.arange(2)])}
    )
    base = np.frombuffer(block, np.uint8)
    for column in decode(block).values():
        assert np.shares_memory(column.values, base)
        assert (column.values.ctypes.data - base.ctypes.data) % 64 == 0
        with pytest.raises(ValueError, match="read-only"):
            column.values[0] = 1


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.integers(1, 600))
def test_a_changed_bit_or_a_missing_end_is_a_block_error(at: int, bit: int, cut: int) -> None:
    block = bytearray(
        encode({"tokens": ragged("row", [np.arange(9, dtype=np.int32)] * 3), "r": Column("sample", np.ones(2))})
    )
    with pytest.raises(BlockError):
        decode(bytes(block[:-cut]) if cut < len(block) else b"")
    block[at % len(block)] ^= 1 << bit
    with pytest.raises(BlockError):
        decode(block)


def test_offsets_that_fall_or_miss_the_end_are_refused() -> None:
    values = np.arange(4, dtype=np.int32)
    for offsets in ([0, 3, 2, 4], [0, 2], [1, 4], [0, 5]):
        with pytest.raises(BlockError, match="offsets"):
            encode({"tokens": Column("row", values, np.array(offsets, np.int64))})


def test_group_scoped_positions_and_patches_keep_their_shape() -> None:
    position = np.arange(3 * 7, dtype=np.int64).reshape(3, 7)
    patches = [np.random.default_rng(i).standard_normal((5 + i, 1176)).astype(np.float32) for i in range(2)]
    block = encode({"positions": ragged("group", [position], transposed=True), "patches": ragged("group", patches)})
    got = decode(block)
    np.testing.assert_array_equal(got["positions"].unit(0), position)
    np.testing.assert_array_equal(got["patches"].unit(1), patches[1])
    one = take(got["patches"], [1])
    np.testing.assert_array_equal(one.unit(0), patches[1])
