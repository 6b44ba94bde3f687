"""Writers that wait for room on the disk, and report it, instead of ending a run."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from relax_common.errors import RelaxError, Unavailable
from relax_common.process.telemetry import get_logger

RETRY_SECONDS = 0.5
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_SQLITE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
DiskError = OSError | sqlite3.Error
T = TypeVar("T")


def has_no_room(error: BaseException) -> bool:
    """Whether the disk is full, so that the same write may succeed later."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    # The low byte is the primary code; the WAL of a full disk answers with one of several kinds of I/O error.
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _FULL_SQLITE


def refused(error: DiskError, folder: Path, what: str) -> RelaxError:
    """The typed error of a failed write: Unavailable where it may be repeated, because there was no room."""
    if has_no_room(error):
        return Unavailable(f"no room below {folder} for {what}; free some, it is tried again")
    return RelaxError(f"{folder}: cannot write {what}: {error}")


class DiskWaits:
    """Records which writers wait for room. One per relaxd; a run's waits show it."""

    def __init__(self) -> None:
        self._waiting: dict[str, int] = {}

    def lines(self) -> list[str]:
        return [f"relaxd waits for room on the disk to write {what}" for what in self._waiting]

    async def hold(self, what: str, write: Callable[[], Awaitable[T]]) -> T:
        """Repeat `write` while the disk has no room for it. Any other failure is raised."""
        held = False
        try:
            while True:
                try:
                    return await write()
                except (OSError, sqlite3.Error, Unavailable) as error:
                    cause = error.__cause__ if isinstance(error, Unavailable) else error
                    if cause is None or not has_no_room(cause):
                        raise
                    if not held:
                        held = True
                        self._waiting[what] = self._waiting.get(what, 0) + 1
                        get_logger().warning("disk_full", waits_to_write=what)
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            if held:
                self._waiting[what] -= 1
                if not self._waiting[what]:
                    del self._waiting[what]
