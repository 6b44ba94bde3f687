"""One state directory, one daemon."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from relax_common.errors import Precondition


def lock_state_dir(folder: Path) -> int:
    """Create the folder and hold its lock for the life of the process; returns the open descriptor."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise Precondition(f"state directory {folder}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise Precondition(
            f"state directory {folder} is in use by another daemon; give each its own --state-dir"
        ) from error
    return fd
