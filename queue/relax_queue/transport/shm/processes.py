"""Detects the end of processes of this host, as reported by the kernel."""

import asyncio
import os
from collections.abc import Callable


class Processes:
    """Watches processes by descriptor, so that a reused process id is never mistaken for the original process."""

    def __init__(self, ended: Callable[[int], None]) -> None:
        self._ended = ended
        self._fds: dict[int, int] = {}

    def watch(self, pid: int) -> bool:
        """`ended(pid)` will be called once; returns False if there is no such process."""
        if pid in self._fds:
            return True
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return False
        self._fds[pid] = fd
        asyncio.get_running_loop().add_reader(fd, self._on_end, pid)
        return True

    def _on_end(self, pid: int) -> None:
        self._forget(pid)
        self._ended(pid)

    def _forget(self, pid: int) -> None:
        fd = self._fds.pop(pid)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)

    def close(self) -> None:
        for pid in list(self._fds):
            self._forget(pid)
