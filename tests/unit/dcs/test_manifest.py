"""The slices of a version: each inside its parameter, all of them together every element once."""

from __future__ import annotations

from typing import Any

import pytest

from dcs.rules.manifest import check_complete, check_slice, manifest_hash, schema_of, slice_key
from relax.dcs.v1 import dcs_pb2
from relax_common.errors import InvalidInput, Precondition


def part(start: tuple[int, ...], extent: tuple[int, ...], **changes: Any) -> dcs_pb2.Slice:
    """Of a [4, 6] matrix of float32."""
    size = 4
    for n in extent:
        size *= n
    values = {"name": "w", "full_shape": (4, 6), "dtype": "F32", "size_bytes": size}
    return dcs_pb2.Slice(start=start, extent=extent, **(values | changes))


WHOLE = part((0, 0), (4, 6))


def test_a_grid_of_slices_is_complete_and_its_hash_does_not_depend_on_order() -> None:
    slices = [part((r, c), (2, 3)) for r in (0, 2) for c in (0, 3)]
    for entry in slices:
        check_slice(entry)
    check_complete(slices, {"w": (4, 6)})
    check_complete(slices, None)
    assert manifest_hash(slices) == manifest_hash(slices[::-1])
    assert manifest_hash(slices) != manifest_hash(slices[:3])
    assert slice_key(slices[1]) == ("w", (0, 3))


def test_a_scalar_is_one_slice_without_dimensions() -> None:
    check_slice(part((), (), full_shape=()))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (part((0, 0), (4, 6), name=""), "the same length"),
        (part((0,), (4, 6)), "the same length"),
        (part((0, 0), (4,)), "the same length"),
        (part((0, 0), (0, 6)), r"start \[0, 0\] \+ extent \[0, 6\] exceeds the shape \[4, 6\]"),
        (part((1, 0), (4, 6)), "exceeds the shape"),
        (part((0, 6), (4, 1)), "exceeds the shape"),
        (part((0, 0), (4, 6), dtype="F8"), "unknown dtype 'F8'; known: .*'BF16'"),
        (part((0, 0), (4, 6), dtype="BF16"), "96 bytes announced, its extent needs 48"),
    ],
)
def test_a_slice_outside_its_parameter_or_of_the_wrong_size_is_refused(entry: dcs_pb2.Slice, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        check_slice(entry)


@pytest.mark.parametrize(
    ("slices", "schema", "says"),
    [
        ([], None, "no slice was pushed"),
        ([], {"w": (4, 6)}, "no slice was pushed"),
        ([part((0, 0), (2, 6))], None, "w: slices cover 12 of 24 elements"),
        ([part((0, 0), (2, 6)), part((1, 0), (2, 6))], None, "cover 24 of 24 elements, each must be there once"),
        ([WHOLE, part((0, 0), (4, 6))], None, "cover 48 of 24"),
        ([part((0, 0), (2, 6)), part((2, 0), (2, 6), full_shape=(6, 6))], None, "disagree about full shape or dtype"),
        ([part((0, 0), (2, 6)), part((2, 0), (2, 6), dtype="I32")], None, "disagree about full shape or dtype"),
        ([WHOLE], {"w": (6, 4)}, r"w: shape \(4, 6\), version 0 has \(6, 4\)"),
        ([WHOLE], {"v": (4, 6)}, r"w: shape \(4, 6\), version 0 has no such parameter"),
        ([WHOLE], {"w": (4, 6), "v": (1,), "u": (2,)}, "2 parameters were not pushed, for example u"),
    ],
)
def test_what_is_not_a_whole_version_is_refused(
    slices: list[dcs_pb2.Slice], schema: dict[str, tuple[int, ...]] | None, says: str
) -> None:
    with pytest.raises(Precondition, match=says):
        check_complete(slices, schema)


def test_overlaps_are_found_between_any_two_slices() -> None:
    """The second and the third overlap; the first touches neither, and one element row is missing."""
    slices = [part((0, 0), (1, 6)), part((1, 0), (2, 6)), part((2, 0), (1, 6))]
    with pytest.raises(Precondition, match="cover 24 of 24"):
        check_complete(slices, None)


def test_the_schema_is_the_full_shape_of_each_parameter() -> None:
    slices = [part((0, 0), (2, 6)), part((2, 0), (2, 6)), part((0,), (5,), name="b", full_shape=(5,))]
    assert schema_of(slices) == {"w": (4, 6), "b": (5,)}
    check_complete(slices, schema_of(slices))
