"""A run's durable log and what it says: frames on disk, the line of versions folded from them.

Every append is handed to the disk before memory changes. If the disk has no room, nothing changes and the caller is
told to repeat the call. Whole records stay on disk; memory keeps the offset of each.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

from dcs.metrics import DISK_WAITS
from dcs.rules.line import Line
from dcs.rules.manifest import schema_of
from relax.dcs.v1 import dcs_pb2
from relax_common.errors import DataLoss, NotFound, Precondition, UnknownRun, WaitsForDisk
from relax_common.process.telemetry import get_logger
from relax_common.storage.framed_log import FramedLog

# The first byte of a frame tells what follows.
_OPEN, _RECORD, _TERM, _BOOT, _SCHEMA = b"O", b"R", b"T", b"B", b"S"


class RunLog:
    """`line`, `schema` and `boots` are what the log says. `disk_wait` tells what it waits for; empty: nothing."""

    def __init__(self, path: Path, spec: dcs_pb2.OpenRunRequest | None = None) -> None:
        """Reads the log of an existing run, or begins a new log with `spec`. Raises OSError, DataLoss, and UnknownRun
        if a crash left the beginning of the log incomplete; the log is then deleted."""
        self.path = path
        self.line = Line()
        self.schema: dict[str, tuple[int, ...]] | None = None
        self.boots = 1
        self.disk_wait = ""
        self.broken = asyncio.Event()
        """Set when an fsync has failed: dcs must end and read the log again."""
        self._positions = array("Q")
        """Where the frame of each revision begins."""
        self._changed = asyncio.Condition()
        self._head_record: tuple[int, dcs_pb2.CommitRecord] | None = None
        self._log = FramedLog(path)
        found = self._replay()
        if spec is not None:
            self._log.append(_OPEN + spec.SerializeToString())
            found = spec
        if found is None and not self._log.end:
            # A crash while the run was being opened: nobody has been told that it was opened.
            self.discard()
            raise UnknownRun(f"{path} was begun but does not name its run")
        if found is None:
            raise DataLoss(f"{path} does not name its run; delete it")
        self.spec = found
        self._durable_revision = self.line.revision
        self._log.append(_BOOT)

    def _replay(self) -> dcs_pb2.OpenRunRequest | None:
        spec: dcs_pb2.OpenRunRequest | None = None
        position = 0
        for frame in self._log.replay():
            kind, body = frame[:1], frame[1:]
            if kind == _OPEN:
                spec = dcs_pb2.OpenRunRequest.FromString(body)
            elif kind == _BOOT:
                self.boots += 1
            elif kind == _TERM:
                term = dcs_pb2.RegisterTermRequest.FromString(body)
                self.line.terms.register(term.holder, term.term)
            elif kind == _SCHEMA:
                self.schema = schema_of(dcs_pb2.GetManifestResponse.FromString(body).slices)
            else:
                self.line.apply(dcs_pb2.LogRecord.FromString(body))
                self._positions.append(position)
            position += FramedLog.HEAD_BYTES + len(frame)
        return spec

    async def sync(self) -> None:
        """Make everything appended durable. After a failed fsync nobody knows what is on disk, so dcs restarts."""
        try:
            await self._log.sync()
        except OSError as error:
            self.broken.set()
            raise WaitsForDisk(f"{self.path}: {error.strerror}; dcs ends and reads its log again") from error

    def _append_frame(self, frame: bytes) -> int:
        """Append a frame; returns its offset. Raises WaitsForDisk, and has then written nothing."""
        if self.broken.is_set():
            raise WaitsForDisk(f"{self.path}: an fsync failed; dcs ends and reads its log again")
        position = self._log.end
        try:
            self._log.append(frame)
        except OSError as error:
            DISK_WAITS.inc()
            free = shutil.disk_usage(self.path.parent).free
            said = f"dcs waits for room on the disk of {self.path}: {error.strerror}, {free} bytes are free"
            if not self.disk_wait:
                get_logger().error("disk_full", error=said)
            self.disk_wait = said
            raise WaitsForDisk(said) from error
        if self.disk_wait:
            get_logger().info("disk_has_room", path=str(self.path))
        self.disk_wait = ""
        return position

    def append(self, record: dcs_pb2.LogRecord) -> int:
        """Append a record; returns its revision. The record is not durable yet."""
        record.revision = self.line.revision + 1
        record.time.FromNanoseconds(time.time_ns())
        self._positions.append(self._append_frame(_RECORD + record.SerializeToString()))
        self.line.apply(record)
        return record.revision

    def append_term(self, holder: str, term: int) -> None:
        self._append_frame(_TERM + dcs_pb2.RegisterTermRequest(holder=holder, term=term).SerializeToString())
        self.line.terms.register(holder, term)

    def append_schema(self, entries: list[dcs_pb2.Slice]) -> None:
        """Log the manifest. After a restart it tells when a head that several ranks push again is complete."""
        self._append_frame(_SCHEMA + dcs_pb2.GetManifestResponse(slices=entries).SerializeToString())
        self.schema = schema_of(entries)

    def record(self, revision: int) -> dcs_pb2.LogRecord:
        position = self._positions[revision - 1]
        frame = next(self._log.read(position, position + 1))
        return dcs_pb2.LogRecord.FromString(frame[1:])

    def head_record(self) -> dcs_pb2.CommitRecord:
        head = self.line.head
        if head is None:
            raise NotFound("nothing is committed yet")
        revision = self.line.commit_of(head).revision
        if self._head_record is None or self._head_record[0] != revision:
            self._head_record = revision, self.record(revision).commit
        return self._head_record[1]

    async def durable(self, revision: int) -> None:
        """Return once everything up to a revision is on disk; its watchers are then woken."""
        await self.sync()
        if revision > self._durable_revision:
            self._durable_revision = revision
            async with self._changed:
                self._changed.notify_all()

    def check_revision(self, after_revision: int) -> None:
        if after_revision > self.line.revision:
            raise Precondition(
                f"the log of {self.spec.run} ends at revision {self.line.revision}, the caller has seen "
                f"{after_revision}: it belongs to another dcs state directory"
            )

    async def watch(self, after_revision: int) -> AsyncIterator[dcs_pb2.LogRecord]:
        """Durable records after a revision, then each new one."""
        position = after_revision
        while True:
            while position < self._durable_revision:
                position += 1
                yield self.record(position)
            async with self._changed:
                while position >= self._durable_revision:
                    await self._changed.wait()

    def close(self) -> None:
        self._log.close()

    def discard(self) -> None:
        """Close and delete a log whose run could not be opened."""
        self.close()
        self.path.unlink(missing_ok=True)
