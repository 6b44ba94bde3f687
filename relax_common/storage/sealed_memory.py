"""Bytes that processes of one host share without a copy, in a memory file that nobody can change any more.

The process that makes it writes it once and seals it. A process that may read the maker's file descriptors can map it,
and keeps the bytes even if the maker dies. The kernel guarantees that the bytes do not change after their hash was
checked.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

Buffer = bytes | bytearray | memoryview

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Place(NamedTuple):
    """Where processes of a host find memory that one of them holds."""

    host: str
    pid: int
    fd: int
    size_bytes: int


class SealedMemory:
    """`view` is read-only. `private` shows the same pages, but writes to it are visible to this process alone:
    libraries that want writable buffers need no copy. The pages go when nothing in any process refers to them."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Takes ownership of the descriptor. Raises OSError if it cannot be mapped."""
        weakref.finalize(self, os.close, fd)
        self._fd = fd
        self.size_bytes = size_bytes
        if size_bytes:
            mapped = mmap.mmap(fd, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            self.private = memoryview(mapped)
        else:
            self.private = memoryview(bytearray())
        self.view = self.private.toreadonly()

    def place(self) -> Place:
        """Valid as long as this object lives."""
        return Place(host_id(), os.getpid(), self._fd, self.size_bytes)


class MemoryWriter:
    """Memory that is being filled from its start."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("relax-bytes", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self._fd)
        self.size_bytes = 0

    def write(self, part: Buffer) -> None:
        """Raises OSError if memory is short."""
        view = memoryview(part)
        view = view if view.nbytes == 0 else view.cast("B")
        while view.nbytes:
            written = os.pwrite(self._fd, view, self.size_bytes)
            self.size_bytes += written
            view = view[written:]

    def sealed(self) -> SealedMemory:
        """Seal the memory: nothing can be written any more."""
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        self._close.detach()
        return SealedMemory(self._fd, self.size_bytes)


def sealed(parts: Iterable[Buffer]) -> SealedMemory:
    writer = MemoryWriter()
    for part in parts:
        writer.write(part)
    return writer.sealed()


def open_sealed(place: Place) -> SealedMemory:
    """Map memory of another process. Raises OSError if it is on another host, out of reach, or can still change."""
    if place.host != host_id():
        raise OSError("the memory is on another host")
    fd = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError(f"descriptor {place.fd} of process {place.pid} is not sealed")
        size = os.fstat(fd).st_size
        if size != place.size_bytes:
            raise OSError(f"{place.size_bytes} bytes were announced, the memory has {size}")
    except OSError:
        os.close(fd)
        raise
    return SealedMemory(fd, size)


def host_id() -> str:
    """An id that is equal for processes that see each other's process ids: same boot of the kernel, same pid
    namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
