"""The newest complete recovery state on dcs's own disk, so that it survives dcs and the actor ending together.

One file per version, `version-00000041.0`: a header (what it holds, each part with its hash) and the bytes of all parts
one after the other. A file gets its name when all of it is on disk; only then are older copies deleted, so there is one
complete copy and at most one more that is being written. A thread writes it while training continues.

| when | then |
|---|---|
| F moves to v, nothing is being written | a copy of v is begun |
| F moves to v while a copy is being written | after that copy ends, a copy of the then newest F is begun |
| a copy is complete | older ones are deleted |
| a write fails | the copy before it stays; the next recovery point tries again; training goes on |
"""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from dcs.checkpoints.writer import Content
from dcs.metrics import RECOVERY_COPIES, RECOVERY_COPY_FAILURES, RECOVERY_COPY_SECONDS
from relax.dcs.v1 import dcs_pb2
from relax_common.errors import DataLoss, NotFound
from relax_common.failpoints import failpoint
from relax_common.process.telemetry import get_logger
from relax_common.storage.checkpoint_folder import folder_name, version_of
from relax_common.storage.framed_log import fsync_folder
from relax_common.storage.sealed_memory import Buffer, MemoryWriter, SealedMemory
from relax_common.versions import PolicyVersion

_MAGIC = b"relaxrc1"
_HEAD = struct.Struct("<8sQQ")  # magic, bytes of the header, xxh3-64 of the header
_UNFINISHED = ".unfinished"
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Copy:
    """A complete copy. `start` is where the bytes of its parts begin."""

    path: Path
    header: dcs_pb2.RecoveryCopyHeader
    start: int

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion.from_proto(self.header.commit.version)

    @property
    def attempt(self) -> int:
        return self.header.commit.attempt

    def state(self, role: str, rank: int) -> tuple[SealedMemory, int]:
        """A rank's state and its hash. Raises NotFound, or DataLoss where the bytes are not what was written."""
        start = self.start + sum(entry.size_bytes for entry in self.header.slices)
        for state in self.header.states:
            if (state.role, state.rank) == (role, rank):
                what = f"the state of {role} rank {rank}"
                return self._read(start, state.size_bytes, ((what, state.size_bytes, state.hash),)), state.hash
            start += state.size_bytes
        raise NotFound(f"the recovery copy of version {self.version} has no state of {role} rank {rank}")

    def weights(self) -> SealedMemory:
        """The bytes of all slices, in their order."""
        parts = [(entry.name, entry.size_bytes, entry.hash) for entry in self.header.slices]
        return self._read(self.start, sum(size for _, size, _ in parts), parts)

    def _read(self, start: int, size: int, parts: Sequence[tuple[str, int, int]]) -> SealedMemory:
        memory = MemoryWriter()
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                while memory.size_bytes < size and (chunk := file.read(min(_READ_BYTES, size - memory.size_bytes))):
                    memory.write(chunk)
        except OSError as error:
            raise DataLoss(f"{self.path}: {error.strerror}") from error
        if memory.size_bytes != size:
            raise DataLoss(f"{self.path}: {memory.size_bytes} of {size} bytes are there")
        whole, at = memory.sealed(), 0
        for name, length, wanted in parts:
            if xxhash.xxh3_64_intdigest(whole.view[at : at + length]) != wanted:
                raise DataLoss(f"{self.path}: {name} is not what was written")
            at += length
        return whole


class RecoveryCopies:
    """One run's copies. `on_changed` is called on the event loop when a copy is complete, or could not be made."""

    def __init__(self, folder: Path, on_changed: Callable[[], None]) -> None:
        self._folder = folder
        self._on_changed = on_changed
        self.task: asyncio.Task[None] | None = None
        """The copy in progress."""
        self._owed: Callable[[], tuple[Content, Callable[[], None]] | None] | None = None
        self.failed = False
        """Whether the last copy failed."""
        self.newest = self._find()

    def _find(self) -> Copy | None:
        copies = []
        for path in sorted(self._folder.glob("*")) if self._folder.is_dir() else []:
            if version_of(path.name) is None:
                path.unlink(missing_ok=True)
                continue
            try:
                copies.append(read_copy(path))
            except DataLoss as error:
                get_logger().warning("recovery_copy_unusable", error=error.message)
        return max(copies, key=lambda copy: (copy.version.lineage, copy.version.number), default=None)

    def start(self, make: Callable[[], tuple[Content, Callable[[], None]] | None]) -> None:
        """Copy what `make` returns: references to bytes, and a function to call when they are no longer needed."""
        if self.task is not None:
            self._owed = make
            return
        made = make()
        if made is not None:
            self.task = asyncio.create_task(self._write(*made))

    async def finish(self) -> None:
        """Wait for the copy in progress, if any."""
        if self.task is not None:
            await asyncio.shield(self.task)

    async def _write(self, content: Content, release: Callable[[], None]) -> None:
        try:
            with RECOVERY_COPY_SECONDS.time():
                self.newest = await asyncio.to_thread(write_copy, self._folder, content)
            self.failed = False
            RECOVERY_COPIES.inc()
        except OSError as error:
            if not self.failed:
                get_logger().error(
                    "recovery_copy_failed",
                    version=str(content.version),
                    error=f"{self._folder}: {error.strerror or error}; {content.size_bytes} bytes are needed",
                    kept=str(self.newest.version) if self.newest else None,
                )
            self.failed = True
            RECOVERY_COPY_FAILURES.inc()
        finally:
            release()
            self.task = None
        self._on_changed()
        owed, self._owed = self._owed, None
        if owed is not None:
            self.start(owed)

    def give_up(self, error: DataLoss) -> None:
        """Called when the newest copy turns out to be damaged."""
        get_logger().error("recovery_copy_unusable", error=error.message)
        self.newest = None

    async def delete(self) -> None:
        """Called when the run has ended."""
        self._owed = None
        await self.finish()
        self.newest = None
        await asyncio.to_thread(shutil.rmtree, self._folder, True)


def write_copy(folder: Path, content: Content) -> Copy:
    """Write the whole file or none of it. On failure (a full disk) raises OSError and leaves no partial file."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fsync_folder(folder.parent)
    final = folder / folder_name(content.version)
    unfinished = final.with_name(final.name + _UNFINISHED)
    header = _header_of(content)
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            body = header.SerializeToString()
            file.write(_HEAD.pack(_MAGIC, len(body), xxhash.xxh3_64_intdigest(body)) + body)
            for part in _parts_of(content):
                file.write(part)
            file.flush()
            failpoint("dcs.recovery_copy_before_fsync")
            os.fsync(file.fileno())
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    unfinished.rename(final)
    fsync_folder(folder)
    for path in folder.glob("version-*"):
        if path != final:
            path.unlink(missing_ok=True)
    return Copy(final, header, _HEAD.size + len(body))


def read_copy(path: Path) -> Copy:
    """Raises DataLoss where the header is damaged or bytes are missing; parts are checked when they are read."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                raise DataLoss(f"{path}: cut short")
            magic, length, wanted = _HEAD.unpack(head)
            body = file.read(length) if magic == _MAGIC else b""
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataLoss(f"{path}: {error.strerror}") from error
    if magic != _MAGIC or xxhash.xxh3_64_intdigest(body) != wanted:
        raise DataLoss(f"{path} is no recovery copy of this release, or its header is damaged")
    header = dcs_pb2.RecoveryCopyHeader.FromString(body)
    total = sum(entry.size_bytes for entry in header.slices) + sum(state.size_bytes for state in header.states)
    if size != _HEAD.size + length + total:
        raise DataLoss(f"{path}: {size} of {_HEAD.size + length + total} bytes are there")
    return Copy(path, header, _HEAD.size + length)


def _header_of(content: Content) -> dcs_pb2.RecoveryCopyHeader:
    return dcs_pb2.RecoveryCopyHeader(
        commit=content.commit,
        slices=[entry for entry, _ in content.slices],
        states=[
            dcs_pb2.SnapshotHeader(role=role, rank=rank, size_bytes=len(state), hash=content.hashes[role, rank])
            for (role, rank), state in content.states.items()
        ],
    )


def _parts_of(content: Content) -> Iterator[Buffer]:
    yield from (data for _, data in content.slices)
    yield from content.states.values()
