"""The broker's arena as seen by another process of its host."""

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import DataLoss
from relax_queue.transport.shm.arena import MAGIC, SECRET_BYTES, SLAB, SLAB_HEAD_BYTES, SLAB_MAGIC, prefault

PREFAULT_BYTES = 2 << 20


class Mapping:
    """Two maps of one arena: to write granted slabs, and to read without being able to write."""

    def __init__(self, pid: int, fd: int, n_bytes: int) -> None:
        """Raises OSError if this process cannot map the arena: another host, container or user."""
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            head = os.pread(opened, len(MAGIC) + SECRET_BYTES, 0)
            if head[: len(MAGIC)] != MAGIC:
                raise OSError(f"descriptor {fd} of process {pid} is not the arena of a queue")
            self.secret = head[len(MAGIC) :]
            self._write = mmap.mmap(opened, n_bytes)
            self._read = mmap.mmap(opened, n_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(opened)
        self._writable, self._readable = memoryview(self._write), memoryview(self._read)
        self._faulted: set[tuple[bool, int]] = set()
        self._write_address = np.frombuffer(self._write, np.uint8).ctypes.data
        self._read_address = np.frombuffer(self._read, np.uint8).ctypes.data

    def writable(self, slab: pb.SlabKey, n_bytes: int) -> memoryview:
        start = slab.offset + SLAB_HEAD_BYTES
        self._prefault(start, n_bytes, write=True)
        return self._writable[start : start + n_bytes]

    def readable(self, slab: pb.SlabKey, closed: Callable[[int], object]) -> memoryview:
        """The bytes of a slab, read-only. `closed(offset)` is called once nothing refers to them any more.

        Raises DataLoss if the slab has been reused.
        """
        self.check(slab)
        start = slab.offset + SLAB_HEAD_BYTES
        self._prefault(start, slab.size_bytes, write=False)
        # Every array made from this memoryview refers to `held`: it lives as long as the last of them.
        held = np.frombuffer(self._readable, np.uint8, slab.size_bytes, start)
        weakref.finalize(held, closed, slab.offset)
        return held.data

    def check(self, slab: pb.SlabKey) -> None:
        magic, generation = SLAB.unpack_from(self._readable, slab.offset)
        if (magic, generation) != (SLAB_MAGIC, slab.generation):
            raise DataLoss(f"slab {slab.offset} has generation {generation}, but {slab.generation} was to be read")

    def _prefault(self, start: int, n_bytes: int, *, write: bool) -> None:
        address = self._write_address if write else self._read_address
        for block in range(start // PREFAULT_BYTES, (start + n_bytes - 1) // PREFAULT_BYTES + 1):
            if (write, block) not in self._faulted:
                self._faulted.add((write, block))
                prefault(address, block * PREFAULT_BYTES, PREFAULT_BYTES, write=write)


class Closed:
    """Collects views that any thread has closed, until the broker is told."""

    def __init__(self) -> None:
        self._offsets: deque[int] = deque()

    def note(self, offset: int) -> None:
        self._offsets.append(offset)

    def drain(self) -> bytes:
        """In the form that FetchRows takes."""
        offsets = []
        while self._offsets:
            offsets.append(self._offsets.popleft())
        return np.array(offsets, "<u8").tobytes()
