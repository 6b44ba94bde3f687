"""How memory is managed in a daemon: freed pages are kept and used again, and garbage is looked for seldom.

By default glibc maps a buffer of a megabyte afresh and gives it back when it is freed; touching its pages for the first
time then costs several times the copy into them.

By default Python looks for cycles behind every 700 objects, which is several times in a call, and from time to time at
all objects that there are, modules included.
"""

from __future__ import annotations

import ctypes
import gc

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
