"""Append-only log of checksummed frames with group commit; a torn tail is cut off at opening.

Frame: u32 length, u32 xxh32 of the payload, payload. Used by the queue and by dcs for their durable state. A log may
keep zeros ahead of its frames: writing over them changes no metadata, and making a frame durable then costs a fraction
of what it costs at the end of a growing file.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import xxhash

from relax_common.errors import DataLoss
from relax_common.process.telemetry import get_logger

_HEAD = struct.Struct("<II")


class FramedLog:
    """One file. `append` buffers in order, `sync` makes everything appended before it durable."""

    HEAD_BYTES = _HEAD.size

    def __init__(self, path: Path, ahead_bytes: int = 0) -> None:
        """`ahead_bytes`: zeros written ahead at a time; `close` cuts off what is left of them."""
        durable_folder(path.parent)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._ahead = bytes(ahead_bytes)
        self._size = os.fstat(self._fd).st_size
        self._appended = 0
        self._synced = 0
        self.end = 0
        """Bytes appended so far: where the next frame begins."""
        self._sync_task: asyncio.Task[None] | None = None
        fsync_folder(path.parent)

    def replay(self) -> Iterator[bytes]:
        """Yield every whole frame, then cut off what a crash left half-written. Call once, before `append`.

        Raises DataLoss if a good frame follows a damaged one: that is not a torn tail, because frames after it were
        acknowledged.
        """
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            good = 0
            while True:
                head = file.read(_HEAD.size)
                if len(head) < _HEAD.size:
                    break
                length, checksum = _HEAD.unpack(head)
                payload = file.read(length)
                if len(payload) < length:
                    break
                if xxhash.xxh32_intdigest(payload) != checksum:
                    self._refuse_if_more_follows(file, good)
                    break
                good = file.tell()
                yield payload
        # Cut off even a tail of zeros: a frame that lost its middle must not reappear later.
        torn = self._bytes_after(good)
        if torn:
            get_logger().warning("log_tail_cut", path=str(self.path), bytes_cut=torn, bytes_kept=good)
        self._cut(good)
        self.end = good

    def _bytes_after(self, position: int) -> int:
        """The length up to the last byte that is not zero."""
        return len(os.pread(self._fd, self._size - position, position).rstrip(b"\0"))

    def _cut(self, position: int) -> None:
        if self._size > position:
            os.ftruncate(self._fd, position)
            self._size = position

    def _refuse_if_more_follows(self, file: BinaryIO, position: int) -> None:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return
        length, checksum = _HEAD.unpack(head)
        payload = file.read(length)
        if length and len(payload) == length and xxhash.xxh32_intdigest(payload) == checksum:
            raise DataLoss(
                f"{self.path}: the frame at byte {position} is damaged and good ones follow it; restore the file from "
                "a copy, or move its state directory away to give the run up"
            )

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """Frames between two positions that `end` had; for readers that follow the log while it grows."""
        while start < end:
            length, _ = _HEAD.unpack(os.pread(self._fd, _HEAD.size, start))
            yield os.pread(self._fd, length, start + _HEAD.size)
            start += _HEAD.size + length

    def append(self, *payloads: bytes) -> None:
        """Hand frames to the operating system in one write; not durable before `sync`."""
        frames = b"".join(_HEAD.pack(len(p), xxhash.xxh32_intdigest(p)) + p for p in payloads)
        view, start, end = memoryview(frames), self.end, self.end + len(frames)
        try:
            while view:
                view = view[os.pwrite(self._fd, view, end - len(view)) :]
        except OSError:
            # A full disk must not leave half a frame before the frames that follow later.
            self._size = os.fstat(self._fd).st_size
            self._cut(start)
            raise
        # The disk begins to write now; the fsync that follows soon then waits half as long.
        os.posix_fadvise(self._fd, start, len(frames), os.POSIX_FADV_DONTNEED)
        self._appended += 1
        self.end = end
        if self.end > self._size:
            self._size = self.end
            if self._ahead:
                self._write_ahead()

    def _write_ahead(self) -> None:
        try:
            self._size += os.pwrite(self._fd, self._ahead, self.end)
        except OSError as error:
            # The frames are written; the next append reserves its own room.
            get_logger().debug("log_not_written_ahead", path=str(self.path), error=error.strerror)

    async def sync(self) -> None:
        """Wait until everything appended so far is on disk; concurrent callers share one fsync."""
        wanted = self._appended
        while self._synced < wanted:
            if self._sync_task is None:
                self._sync_task = asyncio.create_task(self._sync_once())
            # Shielded: one cancelled caller must not cancel the fsync that others wait for.
            await asyncio.shield(self._sync_task)

    async def _sync_once(self) -> None:
        covered = self._appended
        try:
            await asyncio.to_thread(os.fdatasync, self._fd)
            self._synced = covered
        finally:
            self._sync_task = None

    def flush(self) -> None:
        """Make everything appended durable, in the calling thread."""
        os.fdatasync(self._fd)

    def trim(self) -> None:
        """Cut off the zeros ahead: nothing more will be appended soon."""
        if self._appended:
            self._cut(self.end)

    def close(self) -> None:
        self.trim()
        os.fdatasync(self._fd)
        os.close(self._fd)


def durable_folder(folder: Path) -> None:
    """Make a folder, and those above it, so that a power cut leaves them there."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make the folder's entries (a new file's name) durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
