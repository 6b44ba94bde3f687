import numpy as np
import pytest
import xxhash

from rollout_server.weights import BadWeights, SliceSpec, assemble

FULL = np.arange(24, dtype=np.float32).reshape(4, 6)


def piece(rows: slice, columns: slice, **changes: object) -> tuple[SliceSpec, bytearray]:
    part = np.ascontiguousarray(FULL[rows, columns])
    payload = bytearray(part.tobytes())
    values: dict[str, object] = {
        "name": "w",
        "full_shape": FULL.shape,
        "start": (rows.start, columns.start),
        "extent": part.shape,
        "dtype": "F32",
        "hash": xxhash.xxh3_64_intdigest(payload),
        "size_bytes": len(payload),
    }
    return SliceSpec(**(values | changes)), payload  # type: ignore[arg-type]


def test_slices_of_several_ranks_make_the_whole_tensor() -> None:
    made = assemble([piece(slice(0, 4), slice(3, 6)), piece(slice(0, 1), slice(0, 3)), piece(slice(1, 4), slice(0, 3))])
    assert np.array_equal(made["w"].numpy(), FULL)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([piece(slice(0, 4), slice(0, 3))], "cover 12 of 24"),
        ([piece(slice(0, 4), slice(0, 6)), piece(slice(0, 1), slice(0, 1))], "overlap"),
        ([piece(slice(0, 4), slice(0, 6), hash=1)], "hash"),
        ([piece(slice(0, 4), slice(0, 6), size_bytes=95)], "bytes"),
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
    pieces: list[tuple[SliceSpec, bytearray]], message: str
) -> None:
    with pytest.raises(BadWeights, match=message):
        assemble(pieces)
