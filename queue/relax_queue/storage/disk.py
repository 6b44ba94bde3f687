"""Room on the disk, checked before anything is decided so that a full disk changes nothing; sizes of a run's files."""

import os
from dataclasses import dataclass
from pathlib import Path

from relax_common.errors import DiskFull, Exhausted

RESERVE_BYTES = 8 << 20
"""Reserved for work that must go on when the disk is nearly full: following the dcs log, expiring leases, a
snapshot."""


@dataclass(frozen=True, slots=True)
class DiskSizes:
    """segment_bytes: a segment of the log is closed once it has this size and that of the newest snapshot.
    history_bytes: closed segments older than the snapshots, kept for watchers. payload_file_bytes: a payload file
    takes no more blocks once it has this size.
    """

    segment_bytes: int = 4 << 20
    history_bytes: int = 64 << 20
    payload_file_bytes: int = 64 << 20


def free_bytes(folder: Path | str) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def check_room(folder: Path | str, wanted_bytes: int) -> None:
    """Raises Exhausted, with path and space, if fewer bytes are free."""
    free = free_bytes(folder)
    if free < wanted_bytes:
        raise disk_full(folder, free, wanted_bytes)


def disk_full(folder: Path | str, free: int, wanted_bytes: int) -> Exhausted:
    return DiskFull(
        f"the disk below {folder} has {free} bytes free, {wanted_bytes} are needed: free space, the queue goes on then",
        details={"path": str(folder), "free_bytes": str(free), "needed_bytes": str(wanted_bytes)},
    )
