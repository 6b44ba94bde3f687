"""Allocates ranges of an arena: best fit over free ranges, which are merged when freed. Pure bookkeeping."""

import bisect

ALIGN_BYTES = 64


def rounded(n_bytes: int) -> int:
    return -(-max(n_bytes, 1) // ALIGN_BYTES) * ALIGN_BYTES


class Space:
    """Ranges [start, start + size) of one address space; sizes are multiples of 64 bytes."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []
        self._size_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        """end of a free range -> its start"""
        self.n_bytes = 0
        self.free_bytes = 0

    def grow(self, n_bytes: int) -> None:
        """Append free bytes at the end."""
        start, self.n_bytes = self.n_bytes, self.n_bytes + n_bytes
        self.give_back(start, n_bytes)

    def take(self, n_bytes: int) -> int | None:
        """Start of a range of rounded(n_bytes), from the smallest free range that holds it; None if there is none."""
        n_bytes = rounded(n_bytes)
        at = bisect.bisect_left(self._by_size, (n_bytes, 0))
        if at == len(self._by_size):
            return None
        size, start = self._by_size[at]
        self._remove(start, size)
        if size > n_bytes:
            self._insert(start + n_bytes, size - n_bytes)
        return start

    def give_back(self, start: int, n_bytes: int) -> None:
        """Free a range or the end of one that was taken."""
        size = rounded(n_bytes)
        before = self._start_before.get(start)
        if before is not None:
            size += self._remove(before, start - before)
            start = before
        after = self._size_at.get(start + size)
        if after is not None:
            size += self._remove(start + size, after)
        self._insert(start, size)

    def largest_free(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    def tail_free(self) -> int:
        """Free bytes at the very end, which a growth would extend."""
        start = self._start_before.get(self.n_bytes)
        return 0 if start is None else self.n_bytes - start

    def _insert(self, start: int, size: int) -> None:
        bisect.insort(self._by_size, (size, start))
        self._size_at[start] = size
        self._start_before[start + size] = start
        self.free_bytes += size

    def _remove(self, start: int, size: int) -> int:
        del self._by_size[bisect.bisect_left(self._by_size, (size, start))]
        del self._size_at[start], self._start_before[start + size]
        self.free_bytes -= size
        return size
