"""What a daemon takes of its host: one state directory that is its own, and ports that it keeps over restarts."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import socket
from pathlib import Path

from relax_common.errors import InvalidInput, RelaxError, Unavailable


def own_folder(folder: Path) -> None:
    """Make a folder that only its owner can enter, even if it exists already: its files contain prompts."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)


def lock_state_dir(folder: Path) -> int:
    """Create the folder and hold its lock for the life of the process; returns the open descriptor.

    Raises InvalidInput if another folder must be named, Unavailable if the disk is full.
    """
    try:
        own_folder(folder)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        kind: type[RelaxError] = Unavailable if error.errno in (errno.ENOSPC, errno.EDQUOT) else InvalidInput
        raise kind(f"state directory {folder}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise InvalidInput(
            f"state directory {folder} is in use by another daemon; give each its own --state-dir"
        ) from error
    return fd


_LOWEST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_OUTGOING = 32_768
_TRIES = 100


def keepable_port(host: str = "127.0.0.1") -> int:
    """A free port below the range of outgoing connections, so that no connection can take it while its daemon is
    down."""
    try:
        highest = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError):
        highest = _FIRST_OUTGOING
    if highest <= _LOWEST:
        highest = 65_536
    for _ in range(_TRIES):
        port = random.randrange(_LOWEST, highest)
        try:
            with socket.create_server((host, port)):
                return port
        except OSError:
            continue
    raise OSError(f"no free port between {_LOWEST} and {highest} on {host}")
