"""Named crash points for chaos tests: RELAX_FAILPOINTS="name=action[@hit][,...]" with RELAX_FAILPOINTS_DIR.

Actions: `kill` (SIGKILL to this process), `stop` (SIGSTOP), `sleep:SECONDS`. A point fires at its n-th hit (default 1)
and only once per run: the marker file in RELAX_FAILPOINTS_DIR survives the process, so a restarted daemon passes.
Without the variable a hit costs one dictionary look-up.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class _Armed:
    action: str
    hit: int


def _parse(text: str) -> dict[str, _Armed]:
    armed = {}
    for item in filter(None, text.split(",")):
        name, _, rest = item.partition("=")
        action, _, hit = rest.partition("@")
        if action not in ("kill", "stop") and not action.startswith("sleep:"):
            raise ValueError(f"RELAX_FAILPOINTS: {item!r}: action must be kill, stop or sleep:SECONDS")
        armed[name] = _Armed(action, int(hit or 1))
    return armed


_ARMED = _parse(os.environ.get("RELAX_FAILPOINTS", ""))
_HITS: dict[str, int] = dict.fromkeys(_ARMED, 0)


def failpoint(name: str) -> None:
    """Crash, freeze or delay here when a test has armed this name."""
    armed = _ARMED.get(name)
    if armed is None:
        return
    _HITS[name] += 1
    if _HITS[name] != armed.hit or not _claim(name):
        return
    if armed.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif armed.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(float(armed.action.partition(":")[2]))


def _claim(name: str) -> bool:
    """True for the first process of the run that reaches the failpoint."""
    marker = Path(os.environ["RELAX_FAILPOINTS_DIR"]) / f"{name}.fired"
    try:
        fd = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    os.write(fd, f"{os.getpid()} {time.time():.6f}\n".encode())
    os.fsync(fd)
    os.close(fd)
    return True
