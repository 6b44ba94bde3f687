"""Room on the disk: looked at before anything is decided, so that a full disk refuses a call and changes nothing."""

import os
from pathlib import Path

from relax_common.errors import DiskFull, Exhausted

RESERVE_BYTES = 8 << 20
"""Left for what must go on when the disk is nearly full: following the dcs log, leases that run out, a snapshot."""


def free_bytes(folder: Path | str) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def check_room(folder: Path | str, wanted_bytes: int) -> None:
    """Raises Exhausted, with path and space, where fewer bytes are free."""
    free = free_bytes(folder)
    if free < wanted_bytes:
        raise disk_full(folder, free, wanted_bytes)


def disk_full(folder: Path | str, free: int, wanted_bytes: int) -> Exhausted:
    return DiskFull(
        f"the disk below {folder} has {free} bytes free, {wanted_bytes} are needed: free space, the queue goes on then",
        details={"path": str(folder), "free_bytes": str(free), "needed_bytes": str(wanted_bytes)},
    )
