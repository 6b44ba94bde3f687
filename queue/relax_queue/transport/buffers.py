"""Reused buffers for received rows: touching fresh pages costs several times as much as the copy into them."""

import threading
import weakref

import numpy as np
import numpy.typing as npt

KEPT = 2
"""How many unused buffers are kept."""
SMALLEST_BYTES = 1 << 20


class Buffers:
    """Thread-safe. A buffer comes back by itself once no array refers to it any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[npt.NDArray[np.uint8]] = []

    def take(self, n_bytes: int) -> memoryview:
        """A buffer, not cleared."""
        if n_bytes < SMALLEST_BYTES:
            return np.empty(n_bytes, np.uint8).data
        with self._lock:
            fitting = [b for b in self._free if n_bytes <= b.nbytes <= 2 * n_bytes]
            base = min(fitting, key=lambda b: b.nbytes) if fitting else None
            if base is not None:
                self._free = [b for b in self._free if b is not base]
        if base is None:
            base = np.empty(n_bytes + n_bytes // 16, np.uint8)
        # Every array made from this memoryview refers to `held`: it lives as long as the last of them.
        held = np.frombuffer(base.data, np.uint8, n_bytes)
        weakref.finalize(held, self._give_back, base).atexit = False
        return held.data

    def _give_back(self, base: npt.NDArray[np.uint8]) -> None:
        # A finalizer may run while this thread is in `take`; then the buffer is simply not kept.
        if self._lock.acquire(blocking=False):
            try:
                self._free = sorted([*self._free, base], key=lambda b: -b.nbytes)[:KEPT]
            finally:
                self._lock.release()
