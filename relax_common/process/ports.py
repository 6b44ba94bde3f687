"""Ports that a daemon keeps across restarts."""

from __future__ import annotations

import random
import socket
from pathlib import Path

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
