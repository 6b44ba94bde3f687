"""How the C library's allocator is set for processes that move megabytes: freed pages are kept and used again.

By default glibc maps a buffer of a megabyte afresh and gives it back when it is freed; touching its pages for the first
time then costs several times the copy into them.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3

# The largest that glibc takes; what is larger is mapped by itself and leaves when freed.
MAPPED_FROM_BYTES = 32 << 20
KEPT_FREE_BYTES = 128 << 20
GROWN_BY_BYTES = 16 << 20


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
