"""Tensors as bytes, without torch: the table of element types, and the assembly of slices into whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from relax_common.errors import DataLoss


class ElementType(NamedTuple):
    """`name` is what torch and numpy call it (numpy has no bfloat16), `size` is in bytes."""

    name: str
    size: int


ELEMENT_TYPES = {
    "F64": ElementType("float64", 8),
    "F32": ElementType("float32", 4),
    "F16": ElementType("float16", 2),
    "BF16": ElementType("bfloat16", 2),
    "I64": ElementType("int64", 8),
    "I32": ElementType("int32", 4),
    "U8": ElementType("uint8", 1),
}
"""By safetensors name."""

SAFETENSORS_NAMES = {element.name: name for name, element in ELEMENT_TYPES.items()}

Bytes = npt.NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview


class SliceEntry(Protocol):
    """A hyper-rectangle of one parameter; `hash` is xxh3-64 over its bytes, `dtype` a safetensors name."""

    @property
    def name(self) -> str: ...
    @property
    def full_shape(self) -> Sequence[int]: ...
    @property
    def start(self) -> Sequence[int]: ...
    @property
    def extent(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def hash(self) -> int: ...


@dataclass(frozen=True)
class WholeTensor:
    """All bytes of one tensor, C order."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytearray


def region(start: Sequence[int], extent: Sequence[int]) -> tuple[slice, ...]:
    """The index of a hyper-rectangle, for numpy and torch alike."""
    return tuple(slice(first, first + length) for first, length in zip(start, extent, strict=True))


def assemble(slices: Iterable[tuple[SliceEntry, Buffer]], *, check_hashes: bool = True) -> dict[str, WholeTensor]:
    """Whole tensors by name. A tensor that arrived as one slice is that slice's own memory, without a copy.

    Raises DataLoss on a wrong size, overlap or hole, and on a wrong hash: this is where bytes are consumed, and the one
    place where a reader checks them. `check_hashes=False` is for bytes that this process has checked before."""
    by_name: dict[str, list[tuple[SliceEntry, Buffer]]] = {}
    for entry, data in slices:
        _check_bytes(entry, data, check_hashes)
        parts = by_name.setdefault(entry.name, [])
        _check_place(entry, [earlier for earlier, _ in parts])
        parts.append((entry, data))
    return {name: _whole(name, parts) for name, parts in by_name.items()}


def _whole(name: str, parts: Sequence[tuple[SliceEntry, Buffer]]) -> WholeTensor:
    first, data = parts[0]
    shape = tuple(first.full_shape)
    covered, wanted = sum(prod(entry.extent) for entry, _ in parts), prod(shape)
    if covered != wanted:  # slices that neither overlap nor leave the tensor are complete when their sizes add up
        raise DataLoss(f"{name}: slices cover {covered} of {wanted} elements")
    if len(parts) == 1:
        return WholeTensor(first.dtype, shape, data if isinstance(data, memoryview) else memoryview(data))
    size = ELEMENT_TYPES[first.dtype].size
    memory = bytearray(wanted * size)
    whole = np.frombuffer(memory, np.uint8).reshape(*shape, size)
    for entry, part in parts:
        whole[region(entry.start, entry.extent)] = np.frombuffer(part, np.uint8).reshape(*entry.extent, size)
    return WholeTensor(first.dtype, shape, memory)


def _check_bytes(entry: SliceEntry, data: Buffer, check_hash: bool) -> None:
    if entry.dtype not in ELEMENT_TYPES:
        raise DataLoss(f"{entry.name}: element type {entry.dtype} is not one of {', '.join(ELEMENT_TYPES)}")
    wanted = prod(entry.extent) * ELEMENT_TYPES[entry.dtype].size
    if len(data) != wanted:
        raise DataLoss(f"{entry.name}: slice of {len(data)} bytes, its shape needs {wanted}")
    if check_hash and (found := xxhash.xxh3_64_intdigest(data)) != entry.hash:
        raise DataLoss(
            f"{entry.name} at {list(entry.start)}: its bytes have hash {found:016x}, the manifest {entry.hash:016x}"
        )


def _check_place(entry: SliceEntry, earlier: Sequence[SliceEntry]) -> None:
    ends = [start + extent for start, extent in zip(entry.start, entry.extent, strict=True)]
    full = list(entry.full_shape)
    if len(ends) != len(full) or any(end > size for end, size in zip(ends, full, strict=True)):
        raise DataLoss(f"{entry.name}: slice at {list(entry.start)} of {list(entry.extent)} leaves {full}")
    for other in earlier:
        if other.dtype != entry.dtype:
            raise DataLoss(f"{entry.name}: slices disagree on the element type: {entry.dtype} and {other.dtype}")
        if list(other.full_shape) != full:
            raise DataLoss(f"{entry.name}: slices disagree on the shape: {full} and {list(other.full_shape)}")
        if overlap(entry, other):
            raise DataLoss(f"{entry.name}: slices at {list(other.start)} and {list(entry.start)} overlap")


def overlap(one: SliceEntry, other: SliceEntry) -> bool:
    """Whether two slices of one tensor have an element in common."""
    return all(
        max(a, b) < min(a + length_a, b + length_b)
        for a, b, length_a, length_b in zip(one.start, other.start, one.extent, other.extent, strict=True)
    )
