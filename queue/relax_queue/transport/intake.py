"""Memory for incoming payload: allocated as bytes arrive, never by what a header declares, and within a budget."""

import mmap
from collections.abc import Callable

from relax_common.errors import OverBudget
from relax_queue.transport.shm.arena import Slab
from relax_queue.transport.shm.slabs import Slabs

FIRST_BYTES = 4 << 20
"""Initial memory of a larger payload."""
GROWTH = 8
"""Memory grows by this factor when it is full, and to the whole payload if that is less than twice as much. While bytes
move to the larger slab both are there: with 8 that is an eighth more than the payload, with 2 it would be half as much
again."""

Buffer = bytes | bytearray | memoryview


class Intake:
    """Bytes being received for one run. Together with the bytes held they stay within the run's memory budget (I4).

    Rows that a lease has reserved always fit; only bytes without a reservation can exceed the budget.
    """

    def __init__(self, held_bytes: Callable[[], int], budget_bytes: int) -> None:
        self._held_bytes = held_bytes
        self._budget_bytes = budget_bytes
        self.n_bytes = 0

    def claim(self, n_bytes: int, what: str) -> None:
        """Raises OverBudget."""
        held = self._held_bytes()
        if held + self.n_bytes + n_bytes > self._budget_bytes:
            raise OverBudget(
                f"{what}: {n_bytes} bytes more would exceed memory_budget_bytes {self._budget_bytes} of the run: rows "
                f"take {held}, calls in progress {self.n_bytes}; repeat the call later or raise the budget",
            )
        self.n_bytes += n_bytes

    def release(self, n_bytes: int) -> None:
        self.n_bytes -= n_bytes


class Landing:
    """Memory for one payload. With `slabs` it is in the arena if that has room, otherwise on the heap.

    A slab is made of pages that are there already, so a small one is taken first and its bytes move to larger ones. The
    heap is mapped whole, since a page of it is memory only once it is written, and goes back to the system at once.
    """

    def __init__(self, size_bytes: int, intake: Intake, what: str, slabs: Slabs | None = None) -> None:
        self._size_bytes = size_bytes
        self._intake = intake
        self._what = what
        self._slabs = slabs
        self._memory: Buffer = b""
        self._claimed = 0
        self._filled = 0
        self.slab: Slab | None = None
        """The caller that takes the slab must release it."""

    def add(self, chunk: memoryview) -> None:
        """Raises OverBudget. The caller has checked that no more than `size_bytes` come."""
        end = self._filled + len(chunk)
        if self._slabs is not None and end > len(self._memory):
            capacity = max(end, FIRST_BYTES, GROWTH * len(self._memory))
            self._move(self._slabs, capacity if 2 * capacity < self._size_bytes else self._size_bytes)
        elif self.slab is None:
            self._claim(end)
            if not len(self._memory):
                self._memory = _heap(self._size_bytes)
        memoryview(self._memory)[self._filled : end] = chunk
        self._filled = end

    def _claim(self, n_bytes: int) -> None:
        self._intake.claim(n_bytes - self._claimed, self._what)
        self._claimed = n_bytes

    def _move(self, slabs: Slabs, capacity: int) -> None:
        """To a larger slab, or to the heap where the arena is full."""
        self._claim(capacity)
        old_memory, old_slab = self._memory, self.slab
        self.slab = slabs.store(capacity)
        self._memory = slabs.arena.view(self.slab)[:capacity] if self.slab is not None else _heap(self._size_bytes)
        memoryview(self._memory)[: self._filled] = memoryview(old_memory)[: self._filled]
        if old_slab is not None:
            slabs.release(old_slab)

    @property
    def content(self) -> Buffer:
        """The whole payload once all its bytes have come."""
        return self._memory

    def close(self) -> None:
        """The bytes are stored or thrown away: they no longer count as being received."""
        self._intake.release(self._claimed)
        self._claimed = 0
        self._memory = b""


def _heap(n_bytes: int) -> Buffer:
    """Memory for `n_bytes`; larger pieces do not pass through the allocator, which would keep them."""
    return bytearray(n_bytes) if n_bytes <= FIRST_BYTES else memoryview(mmap.mmap(-1, n_bytes))
