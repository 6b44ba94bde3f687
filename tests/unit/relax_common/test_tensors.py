"""Slices become whole tensors; bytes that do not match the manifest are refused."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import xxhash

from relax_common.errors import DataLoss
from relax_common.tensors import ELEMENT_TYPES, WholeTensor, assemble
from relax_common.torch_tensors import as_tensor, safetensors_name, torch_dtype


@dataclass(frozen=True)
class Entry:
    name: str
    full_shape: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]
    dtype: str
    hash: int


FULL = np.arange(24, dtype=np.float32).reshape(4, 6)


def piece(rows: slice, columns: slice, **changes: object) -> tuple[Entry, bytearray]:
    part = np.ascontiguousarray(FULL[rows, columns])
    payload = bytearray(part.tobytes())
    values: dict[str, object] = {
        "name": "w",
        "full_shape": FULL.shape,
        "start": (rows.start, columns.start),
        "extent": part.shape,
        "dtype": "F32",
        "hash": xxhash.xxh3_64_intdigest(payload),
    }
    return Entry(**(values | changes)), payload  # type: ignore[arg-type]


def test_slices_of_several_ranks_make_the_whole_tensor() -> None:
    made = assemble([piece(slice(0, 4), slice(3, 6)), piece(slice(0, 1), slice(0, 3)), piece(slice(1, 4), slice(0, 3))])
    assert made["w"].shape == FULL.shape
    assert np.array_equal(np.frombuffer(made["w"].data, np.float32).reshape(FULL.shape), FULL)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([piece(slice(0, 4), slice(0, 3))], "cover 12 of 24"),
        ([piece(slice(0, 4), slice(0, 6)), piece(slice(0, 1), slice(0, 1))], "overlap"),
        ([piece(slice(0, 4), slice(0, 6), hash=1)], "hash"),
        ([piece(slice(0, 4), slice(0, 6), extent=(3, 6))], "bytes"),
        ([piece(slice(0, 4), slice(0, 6), dtype="I8")], "element type"),
        ([piece(slice(0, 4), slice(0, 6), start=(1, 0))], "leaves"),
        ([piece(slice(0, 2), slice(0, 6)), piece(slice(2, 4), slice(0, 6), full_shape=(5, 6))], "disagree"),
        (
            [
                piece(slice(0, 2), slice(0, 6)),
                piece(slice(2, 4), slice(0, 3), extent=(2, 6), dtype="BF16"),
            ],
            "disagree on the element type",
        ),
    ],
)
def test_I6_bytes_that_are_not_what_the_manifest_says_are_refused(
    pieces: list[tuple[Entry, bytearray]], message: str
) -> None:
    with pytest.raises(DataLoss, match=message):
        assemble(pieces)


def test_a_tensor_in_one_slice_is_that_slices_own_memory() -> None:
    entry, payload = piece(slice(0, 4), slice(0, 6))
    whole = assemble([(entry, memoryview(payload))])["w"]
    payload[0] ^= 1
    assert bytes(whole.data) == bytes(payload)


def test_hashes_that_were_checked_before_need_not_be_checked_again() -> None:
    assert assemble([piece(slice(0, 4), slice(0, 6), hash=1)], check_hashes=False)["w"].shape == (4, 6)


@pytest.mark.parametrize("name", ELEMENT_TYPES)
def test_the_table_of_element_types_is_torchs(name: str) -> None:
    dtype = torch_dtype(name)
    assert (safetensors_name(dtype), dtype.itemsize) == (name, ELEMENT_TYPES[name].size)
    tensor = torch.arange(6).to(dtype).reshape(2, 3)
    made = as_tensor(WholeTensor(name, (2, 3), bytearray(tensor.view(torch.uint8).numpy().tobytes())))
    assert torch.equal(made, tensor)


def test_read_only_bytes_are_copied_into_a_tensor() -> None:
    made = as_tensor(WholeTensor("U8", (2,), memoryview(b"ab")))
    made[0] = 0
    assert made.tolist() == [0, ord("b")]
