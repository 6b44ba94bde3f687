"""Bytes in memory: slices of versions and recovery snapshots, bounded by the run's budget.

They are in sealed memory, so that processes of the same host map them instead of pulling them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import xxhash

from dcs.rules.manifest import SliceKey, slice_key
from dcs.rules.recovery import SnapshotKey
from relax.dcs.v1 import dcs_pb2
from relax_common.errors import AlreadyExists, DataLoss, Exhausted
from relax_common.rpc.channels import CHUNK_BYTES
from relax_common.storage.sealed_memory import SealedMemory


@dataclass(frozen=True)
class Part:
    """A range of sealed memory."""

    memory: SealedMemory
    offset: int
    size_bytes: int

    @property
    def data(self) -> memoryview:
        return self.memory.view[self.offset : self.offset + self.size_bytes]


@dataclass
class HeldVersion:
    """Slices of one attempt. `complete` once every byte of a committed version is there."""

    attempt: int
    slices: dict[SliceKey, tuple[dcs_pb2.Slice, Part]] = field(default_factory=dict)
    complete: bool = False

    def entries(self) -> list[dcs_pb2.Slice]:
        """In the order in which bytes are sent."""
        return [self.slices[key][0] for key in sorted(self.slices)]

    def parts(self) -> list[Part]:
        """In that order."""
        return [self.slices[key][1] for key in sorted(self.slices)]

    def stream(self, offset: int) -> Iterator[bytes]:
        """Bytes of all slices in send order from `offset` on, at most CHUNK_BYTES at a time."""
        pending = bytearray()
        position = 0
        for part in self.parts():
            data = part.data
            skip = max(0, offset - position)
            position += len(data)
            if skip >= len(data):
                continue
            pending += data[skip:]
            while len(pending) >= CHUNK_BYTES:
                yield bytes(pending[:CHUNK_BYTES])
                del pending[:CHUNK_BYTES]
        if pending:
            yield bytes(pending)


class MemoryStore:
    """One run's bytes. Refuses above the budget; nothing is stored in that case."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._users: dict[SealedMemory, int] = {}
        self.versions: dict[tuple[int, int], HeldVersion] = {}
        self.pending: HeldVersion | None = None
        self.snapshots: dict[SnapshotKey, tuple[dcs_pb2.SnapshotHeader, SealedMemory]] = {}

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.used_bytes

    def reserve(self, size_bytes: int, what: str) -> None:
        """Raises Exhausted before anything is received."""
        if self.used_bytes + size_bytes > self.budget_bytes:
            raise Exhausted(
                f"{what}: {size_bytes} bytes on top of {self.used_bytes} exceed dcs.memory_budget_bytes = "
                f"{self.budget_bytes}; raise it"
            )

    @contextmanager
    def receiving(self, size_bytes: int, what: str) -> Iterator[None]:
        """Bytes on their way count too."""
        self.reserve(size_bytes, what)
        self.used_bytes += size_bytes
        try:
            yield
        finally:
            self.used_bytes -= size_bytes

    def hold(self, memories: Iterable[SealedMemory]) -> Callable[[], None]:
        """Count memory that someone else keeps alive even if it is dropped here; returns a function that stops counting
        it."""
        held = list(memories)
        for memory in held:
            self._keep(memory)

        def release() -> None:
            for memory in held:
                self._let_go(memory)

        return release

    def _keep(self, memory: SealedMemory) -> None:
        users = self._users.get(memory, 0)
        self._users[memory] = users + 1
        if not users:
            self.used_bytes += memory.size_bytes

    def _let_go(self, memory: SealedMemory) -> None:
        self._users[memory] -= 1
        if not self._users[memory]:
            del self._users[memory]
            self.used_bytes -= memory.size_bytes

    def add_slice(self, held: HeldVersion, entry: dcs_pb2.Slice, part: Part) -> None:
        """Keep verified bytes. The same slice again is a no-op; other content for it is an error."""
        key = slice_key(entry)
        known = held.slices.get(key)
        if known is not None:
            if known[0] != entry:
                raise AlreadyExists(f"slice of {entry.name} at {list(entry.start)} is stored with other content")
            return
        held.slices[key] = (entry, part)
        self._keep(part.memory)

    def drop_pending(self) -> None:
        if self.pending is not None:
            self._forget(self.pending)
            self.pending = None

    def drop_version(self, key: tuple[int, int]) -> None:
        held = self.versions.pop(key, None)
        if held is not None:
            self._forget(held)

    def _forget(self, held: HeldVersion) -> None:
        for _, part in held.slices.values():
            self._let_go(part.memory)

    def add_snapshot(self, header: dcs_pb2.SnapshotHeader, memory: SealedMemory) -> None:
        """Keep verified bytes. The same state again is a no-op; another state is an error."""
        key = snapshot_key(header)
        known = self.snapshots.get(key)
        if known is not None:
            if known[0].hash != header.hash:
                raise AlreadyExists(f"snapshot {key} is stored with other content")
            return
        self.snapshots[key] = (header, memory)
        self._keep(memory)

    def drop_snapshot(self, key: SnapshotKey) -> None:
        _, memory = self.snapshots.pop(key)
        self._let_go(memory)


def verified_parts(header: dcs_pb2.PushHeader, memory: SealedMemory) -> list[Part]:
    """The bytes of each slice. Raises DataLoss for a wrong hash."""
    parts, offset = [], 0
    for entry in header.slices:
        part = Part(memory, offset, entry.size_bytes)
        if xxhash.xxh3_64_intdigest(part.data) != entry.hash:
            raise DataLoss(f"slice of {entry.name}: bytes do not match their hash; push it again")
        parts.append(part)
        offset += entry.size_bytes
    return parts


def verify_snapshot(header: dcs_pb2.SnapshotHeader, memory: SealedMemory) -> None:
    """Raises DataLoss for a wrong hash."""
    what = f"snapshot of {header.role} rank {header.rank}"
    if xxhash.xxh3_64_intdigest(memory.view) != header.hash:
        raise DataLoss(f"{what}: bytes do not match their hash")


def snapshot_key(header: dcs_pb2.SnapshotHeader) -> SnapshotKey:
    return header.version.lineage, header.version.number, header.attempt, header.role, header.rank
