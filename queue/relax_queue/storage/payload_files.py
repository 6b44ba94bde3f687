"""Payload on disk next to the log (durability `full`): blocks in append-only files, removed as their rows are freed.

A frame is written before the record that names it and made durable before it, so a record on disk has its payload.
A frame that no record names was left by a crash or a refusal; it is never read.
"""

import os
import struct
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from relax_common.failpoints import failpoint
from relax_common.process.telemetry import get_logger
from relax_common.storage.framed_log import durable_folder, fsync_folder
from relax_queue.storage.disk import DiskSizes

_HEAD = struct.Struct("<8sQQQ")  # magic, block, bytes, xxh3 of the bytes
_MAGIC = b"RXEXTENT"
_PREFIX = "payload-"

Buffer = bytes | bytearray | memoryview


@dataclass(slots=True, eq=False)
class _File:
    path: Path
    number: int
    size: int = 0
    live: dict[int, tuple[int, int]] = field(default_factory=dict)
    """block -> (position of its bytes, how many)"""

    @property
    def live_bytes(self) -> int:
        return sum(n + _HEAD.size for _, n in self.live.values())


class PayloadFiles:
    """All payload files of a run. One thread writes, any may flush."""

    def __init__(self, folder: Path, file_bytes: int = DiskSizes().payload_file_bytes) -> None:
        durable_folder(folder)
        self.folder = folder
        self._file_bytes = file_bytes
        self._files = [_File(p, int(p.name.removeprefix(_PREFIX))) for p in sorted(folder.glob(f"{_PREFIX}*"))]
        self._where: dict[int, _File] = {}
        self._fd = -1
        self._closing: list[int] = []
        self._written = self._flushed = 0
        self._flushing = threading.Lock()

    def recover(self, named: Collection[int]) -> Iterator[tuple[int, bytearray]]:
        """Blocks that the state names and whose bytes are intact. Later frames of a block replace earlier ones."""
        for file in self._files:
            self._scan(file)
        for block in sorted(self._where):
            file = self._where[block]
            content = self._read(file, block) if block in named else None
            if content is not None:
                yield block, content
        self.free(named)

    def _scan(self, file: _File) -> None:
        size = file.path.stat().st_size
        with file.path.open("rb") as source:
            while file.size + _HEAD.size <= size:
                source.seek(file.size)
                magic, block, n_bytes, _ = _HEAD.unpack(source.read(_HEAD.size))
                if magic != _MAGIC or file.size + _HEAD.size + n_bytes > size:
                    break  # a torn tail: nothing after it was acknowledged
                self._place(block, file, file.size + _HEAD.size, n_bytes)
                file.size += _HEAD.size + n_bytes

    def _place(self, block: int, file: _File, position: int, n_bytes: int) -> None:
        old = self._where.get(block)
        if old is not None:
            old.live.pop(block, None)
        file.live[block] = (position, n_bytes)
        self._where[block] = file

    def _read(self, file: _File, block: int) -> bytearray | None:
        position, n_bytes = file.live[block]
        content = bytearray(n_bytes)
        with file.path.open("rb") as source:
            source.seek(position - _HEAD.size)
            checksum = _HEAD.unpack(source.read(_HEAD.size))[3]
            source.readinto(content)
        if xxhash.xxh3_64_intdigest(content) != checksum:
            get_logger().error("payload_damaged", path=str(file.path), block=block)
            return None
        return content

    def write(self, block: int, content: Buffer) -> None:
        """Hand a block to the operating system; it is durable with the next flush. On OSError nothing is left."""
        file = self._active()
        head = _HEAD.pack(_MAGIC, block, len(content), xxhash.xxh3_64_intdigest(content))
        start = file.size
        failpoint("queue.before_payload_write")
        try:
            self._write_all(head)
            failpoint("queue.payload_half_written")
            self._write_all(content)
        except OSError:
            os.ftruncate(self._fd, start)
            os.lseek(self._fd, start, os.SEEK_SET)
            raise
        file.size = start + len(head) + len(content)
        self._place(block, file, start + len(head), len(content))
        self._written += 1

    def _write_all(self, content: Buffer) -> None:
        view = memoryview(content)
        while view:
            view = view[os.write(self._fd, view) :]

    def _active(self) -> _File:
        if self._fd >= 0 and self._files[-1].size < self._file_bytes:
            return self._files[-1]
        number = self._files[-1].number + 1 if self._files else 1
        file = _File(self.folder / f"{_PREFIX}{number:012d}", number)
        fd = os.open(file.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        fsync_folder(self.folder)
        if self._fd >= 0:
            self._closing.append(self._fd)
        self._fd = fd
        self._files.append(file)
        return file

    def flush(self) -> None:
        """Make everything written so far durable. May run in any thread, concurrently with `write`."""
        with self._flushing:
            written, active = self._written, self._fd
            if written == self._flushed:
                return
            closing = list(self._closing)  # read after `active`: a file that is closed in between is in one of them
            for fd in {active, *closing}:
                os.fdatasync(fd)
            self._flushed = written
            for fd in closing:
                os.close(fd)
                self._closing.remove(fd)

    def free(self, named: Collection[int]) -> None:
        """Forget blocks that the state has forgotten; files with no block left are removed."""
        if len(self._where) == len(named):
            return
        for block in [e for e in self._where if e not in named]:
            self._where.pop(block).live.pop(block)
        for file in self._closed_files():
            if not file.live:
                self._remove(file)
        self._move_a_remnant()

    def _closed_files(self) -> list[_File]:
        return self._files[:-1] if self._fd >= 0 else list(self._files)

    def _remove(self, file: _File) -> None:
        file.path.unlink()
        self._files.remove(file)

    def _move_a_remnant(self) -> None:
        """If few old blocks keep a file alive, they move to the active file: the disk holds at most 4 x the rows."""
        sparse = next((f for f in self._closed_files() if 4 * f.live_bytes < f.size), None)
        if sparse is None or self._fd < 0:
            return
        for block in list(sparse.live):
            content = self._read(sparse, block)
            if content is not None:
                self.write(block, content)
        os.fdatasync(self._fd)
        self._remove(sparse)

    def close(self) -> None:
        self.flush()
        for fd in (*self._closing, *([self._fd] if self._fd >= 0 else [])):
            os.close(fd)

    @property
    def disk_bytes(self) -> int:
        return sum(file.size for file in self._files)
