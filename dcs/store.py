"""Bytes in memory: slices of versions and recovery snapshots, bounded by the run's budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import xxhash

from dcs.manifest import SliceKey, slice_key
from relax.dcs.v1 import dcs_pb2
from relax_common.channels import CHUNK_BYTES
from relax_common.errors import AlreadyExists, DataLoss, Exhausted


@dataclass
class HeldVersion:
    """Slices of one attempt. `complete` once every byte of a committed version is there."""

    attempt: int
    slices: dict[SliceKey, tuple[dcs_pb2.Slice, bytes]] = field(default_factory=dict)
    complete: bool = False

    def entries(self) -> list[dcs_pb2.Slice]:
        """In the order in which bytes are sent."""
        return [self.slices[key][0] for key in sorted(self.slices)]

    def stream(self, offset: int) -> Iterator[bytes]:
        """Bytes of all slices in that order, from `offset`, at most 1 MiB a piece (small slices share one)."""
        pending = bytearray()
        position = 0
        for key in sorted(self.slices):
            data = self.slices[key][1]
            skip = max(0, offset - position)
            position += len(data)
            if skip >= len(data):
                continue
            pending += memoryview(data)[skip:]
            while len(pending) >= CHUNK_BYTES:
                yield bytes(pending[:CHUNK_BYTES])
                del pending[:CHUNK_BYTES]
        if pending:
            yield bytes(pending)


SnapshotKey = tuple[int, int, int, str, int]
"""(lineage, number, attempt, role, rank)"""


class MemoryStore:
    """One run's bytes. Refuses above the budget; nothing is stored in that case."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.versions: dict[tuple[int, int], HeldVersion] = {}
        self.pending: HeldVersion | None = None
        self.snapshots: dict[SnapshotKey, tuple[dcs_pb2.SnapshotHeader, bytes]] = {}

    def reserve(self, size_bytes: int, what: str) -> None:
        """Raises Exhausted before anything is received."""
        if self.used_bytes + size_bytes > self.budget_bytes:
            raise Exhausted(
                f"{what}: {size_bytes} bytes on top of {self.used_bytes} exceed dcs.memory_budget_bytes = "
                f"{self.budget_bytes}; raise it"
            )

    def hold(self, size_bytes: int) -> Callable[[], None]:
        """Count bytes that someone else keeps alive; returns what ends that."""
        self.used_bytes += size_bytes

        def release() -> None:
            self.used_bytes -= size_bytes

        return release

    def add_slice(self, held: HeldVersion, entry: dcs_pb2.Slice, data: bytes) -> None:
        """Check the hash, then keep; the same slice again is a no-op, another content an error."""
        if xxhash.xxh3_64_intdigest(data) != entry.hash:
            raise DataLoss(f"slice of {entry.name}: bytes do not match their hash; push it again")
        key = slice_key(entry)
        known = held.slices.get(key)
        if known is not None:
            if known[0] != entry:
                raise AlreadyExists(f"slice of {entry.name} at {list(entry.start)} is stored with other content")
            return
        held.slices[key] = (entry, data)
        self.used_bytes += len(data)

    def drop_pending(self) -> None:
        if self.pending is not None:
            self._forget(self.pending)
            self.pending = None

    def drop_version(self, key: tuple[int, int]) -> None:
        held = self.versions.pop(key, None)
        if held is not None:
            self._forget(held)

    def _forget(self, held: HeldVersion) -> None:
        self.used_bytes -= sum(len(data) for _, data in held.slices.values())

    def add_snapshot(self, header: dcs_pb2.SnapshotHeader, data: bytes) -> None:
        if xxhash.xxh3_64_intdigest(data) != header.hash:
            raise DataLoss(f"snapshot of {header.role} rank {header.rank}: bytes do not match their hash")
        key = snapshot_key(header)
        known = self.snapshots.get(key)
        if known is not None:
            if known[0].hash != header.hash:
                raise AlreadyExists(f"snapshot {key} is stored with other content")
            return
        self.snapshots[key] = (header, data)
        self.used_bytes += len(data)

    def drop_snapshot(self, key: SnapshotKey) -> None:
        _, data = self.snapshots.pop(key)
        self.used_bytes -= len(data)


def snapshot_key(header: dcs_pb2.SnapshotHeader) -> SnapshotKey:
    return header.version.lineage, header.version.number, header.attempt, header.role, header.rank
