"""The broker's arena: memory that every process of the host can map, pre-faulted piece by piece and reused.

    header   magic "RLXARENA", 16 secret bytes: a process that can read them has mapped this arena
    slabs    at multiples of 64 bytes: magic "RLXSLAB", generation u64, then the bytes of a block

A memfd has no name in any file system, so a broker that is killed leaves nothing behind; maps that readers hold stay
valid. A generation is used once: a slab that has been reused does not match its old key.
"""

import ctypes
import mmap
import os
import secrets
import struct
from dataclasses import dataclass

from relax_common.errors import Exhausted
from relax_common.process.telemetry import get_logger
from relax_queue.transport.shm.space import ALIGN_BYTES, Space, rounded

GROWTH_BYTES = 16 << 20
"""Size by which the arena grows; so much is pre-faulted in some 5 ms."""
SECRET_BYTES = 16
MAGIC = b"RLXARENA"
SLAB = struct.Struct("<8sQ")
SLAB_MAGIC = b"RLXSLAB\0"
SLAB_HEAD_BYTES = ALIGN_BYTES
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Slab:
    """A range of the arena under one generation; `size` counts the bytes after its head."""

    offset: int
    size: int
    generation: int


def prefault(address: int, start: int, n_bytes: int, *, write: bool) -> None:
    """Enter pages into this process's tables at once instead of one fault per page; no effect on old kernels."""
    page = mmap.PAGESIZE
    begin = (address + start) // page * page
    length = address + start + n_bytes - begin
    _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _POPULATE_WRITE if write else _POPULATE_READ)


def address_of(view: memoryview) -> int:
    """The address of a writable buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Arena:
    """Hands out slabs. `limit_bytes` is the most it grows to; 0: there is no arena."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes // GROWTH_BYTES * GROWTH_BYTES
        self._space = Space()
        self._generations = 0
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.fd = -1
        if not self.limit_bytes:
            return
        self.fd = os.memfd_create("relax-queue-arena", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.limit_bytes)
        try:
            self._map = mmap.mmap(self.fd, self.limit_bytes)
        except (OSError, MemoryError) as error:
            raise Exhausted(
                f"the arena of {self.limit_bytes} bytes cannot be mapped ({error}): lower --arena-bytes, or raise the "
                f"limit of this process's address space (ulimit -v)"
            ) from error
        self._view = memoryview(self._map)
        self._address = address_of(self._view)

    def take(self, n_bytes: int) -> Slab | None:
        """A slab for that many bytes; None if the arena is full."""
        wanted = rounded(SLAB_HEAD_BYTES + n_bytes)
        offset = self._space.take(wanted)
        while offset is None:
            if not self._grow(wanted):
                return None
            offset = self._space.take(wanted)
        self._generations += 1
        slab = Slab(offset, wanted - SLAB_HEAD_BYTES, self._generations)
        SLAB.pack_into(self._view, offset, SLAB_MAGIC, slab.generation)
        return slab

    def _grow(self, wanted: int) -> bool:
        missing = wanted - self._space.tail_free()
        if self._space.n_bytes == 0:
            missing += rounded(len(MAGIC) + SECRET_BYTES)
        start, n_bytes = self._space.n_bytes, -(-missing // GROWTH_BYTES) * GROWTH_BYTES
        if start + n_bytes > self.limit_bytes:
            return False
        try:
            os.posix_fallocate(self.fd, start, n_bytes)
        except OSError as error:
            # Memory is short: without this, the process that touches the pages would be killed.
            get_logger().warning("arena_not_grown", bytes=start, wanted=n_bytes, error=error.strerror)
            return False
        prefault(self._address, start, n_bytes, write=True)
        self._space.grow(n_bytes)
        if start == 0:
            head = MAGIC + self.secret
            self._view[self._space.take(len(head)) or 0 : len(head)] = head
        return True

    def open(self) -> bool:
        """Make the first piece, so that its header can be read; returns whether there is an arena."""
        return bool(self._space.n_bytes) or (bool(self.limit_bytes) and self._grow(0))

    def view(self, slab: Slab) -> memoryview:
        """Bytes of a slab, writable."""
        start = slab.offset + SLAB_HEAD_BYTES
        return self._view[start : start + slab.size]

    def shrink(self, slab: Slab, n_bytes: int) -> Slab:
        """The same slab without its unused end."""
        size = rounded(n_bytes)
        if size < slab.size:
            self._space.give_back(slab.offset + SLAB_HEAD_BYTES + size, slab.size - size)
        return Slab(slab.offset, min(size, slab.size), slab.generation)

    def give_back(self, slab: Slab) -> None:
        SLAB.pack_into(self._view, slab.offset, b"\0" * 8, 0)
        self._space.give_back(slab.offset, SLAB_HEAD_BYTES + slab.size)

    @property
    def grown_bytes(self) -> int:
        return self._space.n_bytes

    @property
    def used_bytes(self) -> int:
        return self._space.n_bytes - self._space.free_bytes
