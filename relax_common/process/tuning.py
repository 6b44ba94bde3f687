"""Tunes a process: it keeps freed memory, seldom collects garbage, polls sockets in the waiting thread, and ends with
its parent if told to. Imports only the standard library: the engine's process may have none of our libraries.

By default glibc maps each buffer of a megabyte afresh and unmaps it when it is freed; touching fresh pages costs
several times as much as the copy into them. By default Python looks for cycles after every 700 new objects, which is
several times per call, and now and then it looks at every object in the process.

By default gRPC's own threads poll its sockets and pass every event to the thread that waits for it. On a stream of
megabyte frames, a fifth of all CPU time goes into waking threads (`benchmarks/queue_bench.py`, grpc). The waiting
thread can poll by itself, as it did in earlier releases.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8

# The largest value that glibc accepts; a larger buffer is mapped separately and unmapped when freed.
MAPPED_FROM_BYTES = 32 << 20
KEPT_FREE_BYTES = 128 << 20
GROWN_BY_BYTES = 16 << 20
OBJECTS_BETWEEN_COLLECTIONS = 20_000


def keep_freed_pages() -> bool:
    """Call once, at the start of a process; returns False if the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = (
        (_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES),
        (_M_TRIM_THRESHOLD, KEPT_FREE_BYTES),
        (_M_TOP_PAD, GROWN_BY_BYTES),
        # Otherwise each thread has its own memory to keep, and the process grows for hours until all are full.
        (_M_ARENA_MAX, 1),
    )
    return all(mallopt(name, value) for name, value in settings)


def collect_seldom() -> None:
    """Call once, when everything that the process keeps for good is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS, *gc.get_threshold()[1:])


SETTING = "GRPC_EXPERIMENTS"
POLLED_BY_CALLERS = "-event_engine_client,-event_engine_listener"


def poll_where_it_waits() -> None:
    """For packages that move payload: call before importing grpc, which reads its settings then. Keeps the user's
    own."""
    os.environ.setdefault(SETTING, POLLED_BY_CALLERS)


_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    """From now on the kernel kills this process when its parent ends. Raises SystemExit if it has ended already.

    `parent_pid` comes from the parent itself: 1 may be an init that has adopted this process, or the parent.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        raise SystemExit(f"process {parent_pid}, which started this one, has ended already")
