import numpy as np
import pytest
import xxhash

from rollout_server.engines.contract import EngineError, Probe, Tolerance
from rollout_server.engines.weights import BadWeights, SliceSpec, assemble

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


@pytest.mark.parametrize(
    ("largest", "mean", "refused"),
    [(0.5, 0.2, ""), (0.3, 0.2, "4.00e-01 (largest)"), (9.0, 0.05, "1.00e-01 (mean)"), (float("inf"), 0.2, "")],
)
def test_I6_a_probe_bounds_the_largest_and_the_mean_difference(largest: float, mean: float, refused: str) -> None:
    theirs = [np.zeros(3, np.float32), np.empty(0, np.float32), np.zeros(1, np.float32)]
    ours = [np.array([0, 0.4, 0], np.float32), np.empty(0, np.float32), np.zeros(1, np.float32)]
    probe = Probe([[1, 2, 3, 4], [1], [1, 2]], theirs, 1.0, Tolerance(largest, mean))
    if refused:
        with pytest.raises(EngineError, match=refused.replace("(", "[(]").replace(")", "[)]")):
            probe.check(ours, 7)
    else:
        assert probe.check(ours, 7) == pytest.approx(0.4)
    with pytest.raises(EngineError, match="nan"):
        probe.check([ours[0] * np.nan, *ours[1:]], 7)
