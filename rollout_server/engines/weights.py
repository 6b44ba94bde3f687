"""From verified slices to whole tensors. Nothing here touches a live model."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class BadWeights(ValueError):
    """The bytes are not what the manifest says; the version must not be served."""


@dataclass(frozen=True)
class SliceSpec:
    """A hyper-rectangle of one parameter; `hash` is xxh3-64 over its bytes, `dtype` a safetensors name."""

    name: str
    full_shape: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]
    dtype: str
    hash: int
    size_bytes: int


def assemble(slices: Iterable[tuple[SliceSpec, bytearray | memoryview]]) -> dict[str, Tensor]:
    """Whole tensors by Hugging Face name, of the slices' element type; one that came in one slice is that slice's own
    memory. Raises BadWeights on a wrong hash, size, overlap or hole."""
    by_name: dict[str, list[SliceSpec]] = {}
    tensors: dict[str, Tensor] = {}
    for spec, payload in slices:
        _check_bytes(spec, payload)
        earlier = by_name.setdefault(spec.name, [])
        _check_place(spec, earlier)
        part = torch.frombuffer(payload, dtype=DTYPES[spec.dtype]).reshape(spec.extent)
        if spec.extent == spec.full_shape:
            tensors[spec.name] = part
        else:
            if not earlier:
                tensors[spec.name] = torch.empty(spec.full_shape, dtype=DTYPES[spec.dtype])
            region = tuple(slice(start, start + extent) for start, extent in zip(spec.start, spec.extent, strict=True))
            tensors[spec.name][region] = part
        earlier.append(spec)
    for name, specs in by_name.items():
        _check_complete(name, specs)
    return tensors


def _check_bytes(spec: SliceSpec, payload: bytearray | memoryview) -> None:
    if spec.dtype not in DTYPES:
        raise BadWeights(f"{spec.name}: element type {spec.dtype} is not one of {', '.join(DTYPES)}")
    wanted = math.prod(spec.extent) * DTYPES[spec.dtype].itemsize
    if not len(payload) == spec.size_bytes == wanted:
        raise BadWeights(f"{spec.name}: slice of {len(payload)} bytes, manifest {spec.size_bytes}, shape {wanted}")
    found = xxhash.xxh3_64_intdigest(payload)
    if found != spec.hash:
        raise BadWeights(f"{spec.name} at {spec.start}: hash {found:016x}, manifest {spec.hash:016x}")


def _check_place(spec: SliceSpec, earlier: Sequence[SliceSpec]) -> None:
    ends = [start + extent for start, extent in zip(spec.start, spec.extent, strict=True)]
    if len(ends) != len(spec.full_shape) or any(end > full for end, full in zip(ends, spec.full_shape, strict=True)):
        raise BadWeights(f"{spec.name}: slice at {spec.start} of {spec.extent} leaves {spec.full_shape}")
    for other in earlier:
        if other.dtype != spec.dtype:
            raise BadWeights(f"{spec.name}: slices disagree on the element type: {spec.dtype} and {other.dtype}")
        if other.full_shape != spec.full_shape:
            raise BadWeights(f"{spec.name}: slices disagree on the shape: {spec.full_shape} and {other.full_shape}")
        if _overlap(spec, other):
            raise BadWeights(f"{spec.name}: slices at {other.start} and {spec.start} overlap")


def _overlap(one: SliceSpec, other: SliceSpec) -> bool:
    return all(
        max(a, b) < min(a + length_a, b + length_b)
        for a, b, length_a, length_b in zip(one.start, other.start, one.extent, other.extent, strict=True)
    )


def _check_complete(name: str, specs: Sequence[SliceSpec]) -> None:
    """Slices that neither overlap nor leave the tensor are complete exactly when their sizes add up."""
    covered, wanted = sum(math.prod(spec.extent) for spec in specs), math.prod(specs[0].full_shape)
    if covered != wanted:
        raise BadWeights(f"{name}: slices cover {covered} of {wanted} elements")
