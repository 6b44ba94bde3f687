"""How a daemon's process is tuned: it keeps freed memory, seldom collects garbage, and polls sockets where it waits.

By default glibc maps each buffer of a megabyte again and gives it back when it is freed; touching fresh pages costs
several times the copy into them. By default Python looks for cycles after every 700 new objects, which is several times
per call, and now and then it looks at every object in the process.

By default gRPC's own threads look after its sockets and hand every event on to the thread that waits for it. On a
stream of megabyte frames a fifth of all CPU time goes into waking each other (`benchmarks/queue_bench.py`, grpc). The
thread that waits can look itself, as it did in earlier releases.
"""

from __future__ import annotations

import ctypes
import gc
import os

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3

# The largest that glibc takes; what is larger is mapped by itself and leaves when freed.
MAPPED_FROM_BYTES = 32 << 20
KEPT_FREE_BYTES = 128 << 20
GROWN_BY_BYTES = 16 << 20
OBJECTS_BETWEEN_COLLECTIONS = 20_000


def keep_freed_pages() -> bool:
    """Once, at the start of a process; False where the C library is another than glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = (
        (_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES),
        (_M_TRIM_THRESHOLD, KEPT_FREE_BYTES),
        (_M_TOP_PAD, GROWN_BY_BYTES),
    )
    return all(mallopt(name, value) for name, value in settings)


def collect_seldom() -> None:
    """Once, when what a process has loaded is there to stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS, *gc.get_threshold()[1:])


SETTING = "GRPC_EXPERIMENTS"
POLLED_BY_CALLERS = "-event_engine_client,-event_engine_listener"


def poll_where_it_waits() -> None:
    """For packages that move payload, before they import grpc, which reads its settings then. Keeps a user's own."""
    os.environ.setdefault(SETTING, POLLED_BY_CALLERS)
