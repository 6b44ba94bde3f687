"""What a version consists of: slices of named parameters, their coverage and their digest. Pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod

import xxhash

from relax.dcs.v1 import dcs_pb2
from relax_common.errors import InvalidInput, Precondition
from relax_common.tensors import ELEMENT_TYPES, overlap

SliceKey = tuple[str, tuple[int, ...]]


def slice_key(entry: dcs_pb2.Slice) -> SliceKey:
    """Identifies a slice within its version: parameter and first index per dimension."""
    return entry.name, tuple(entry.start)


def check_slice(entry: dcs_pb2.Slice) -> None:
    """Refuse a slice that reaches outside its parameter, or whose size does not match its shape."""
    dims = len(entry.full_shape)
    if not entry.name or len(entry.start) != dims or len(entry.extent) != dims:
        raise InvalidInput(f"slice of {entry.name!r}: start, extent and full_shape need the same length")
    for full, start, extent in zip(entry.full_shape, entry.start, entry.extent, strict=True):
        if extent == 0 or start + extent > full:
            raise InvalidInput(
                f"slice of {entry.name}: start {list(entry.start)} + extent {list(entry.extent)} exceeds the shape "
                f"{list(entry.full_shape)}"
            )
    if entry.dtype not in ELEMENT_TYPES:
        raise InvalidInput(f"slice of {entry.name}: unknown dtype {entry.dtype!r}; known: {sorted(ELEMENT_TYPES)}")
    size = prod(entry.extent) * ELEMENT_TYPES[entry.dtype].size
    if size != entry.size_bytes:
        raise InvalidInput(f"slice of {entry.name}: {entry.size_bytes} bytes announced, its extent needs {size}")


def check_complete(slices: Sequence[dcs_pb2.Slice], schema: dict[str, tuple[int, ...]] | None) -> None:
    """Check that every parameter is covered exactly once, and that the parameters are those of `schema` (version
    0's)."""
    by_name: dict[str, list[dcs_pb2.Slice]] = defaultdict(list)
    for entry in slices:
        by_name[entry.name].append(entry)
    if not by_name:
        raise Precondition("no slice was pushed")
    for name, parts in by_name.items():
        full = tuple(parts[0].full_shape)
        if any(tuple(part.full_shape) != full or part.dtype != parts[0].dtype for part in parts):
            raise Precondition(f"{name}: its slices disagree about full shape or dtype")
        covered = sum(prod(part.extent) for part in parts)
        if covered != prod(full) or _any_overlap(parts):
            raise Precondition(f"{name}: slices cover {covered} of {prod(full)} elements, each must be there once")
        if schema is not None and schema.get(name) != full:
            raise Precondition(f"{name}: shape {full}, version 0 has {schema.get(name, 'no such parameter')}")
    missing = set(schema or ()) - set(by_name)
    if missing:
        raise Precondition(f"{len(missing)} parameters were not pushed, for example {min(missing)}")


def schema_of(slices: Iterable[dcs_pb2.Slice]) -> dict[str, tuple[int, ...]]:
    """Full shape by parameter name."""
    return {entry.name: tuple(entry.full_shape) for entry in slices}


def manifest_hash(slices: Sequence[dcs_pb2.Slice]) -> int:
    """xxh3-64 over the slices in key order; equal content has equal hashes whatever the order of the pushes."""
    digest = xxhash.xxh3_64()
    for entry in sorted(slices, key=slice_key):
        digest.update(entry.SerializeToString(deterministic=True))
    return digest.intdigest()


def _any_overlap(parts: Sequence[dcs_pb2.Slice]) -> bool:
    return any(overlap(a, b) for i, a in enumerate(parts) for b in parts[i + 1 :])
