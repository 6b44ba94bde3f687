"""The engine's process ends with the one that started it. Imports nothing that takes time."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """From now on this process ends with its parent. Raises SystemExit if the parent has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        raise SystemExit("the rollout server ended before its engine had started")
