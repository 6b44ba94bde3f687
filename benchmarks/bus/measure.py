"""CPU time and memory of processes, from /proc."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def rss_bytes(pid: int, *kinds: str) -> int:
    """Resident memory of the given `kinds` (RssAnon, RssFile, RssShmem), or of all kinds if none is given."""
    wanted = kinds or ("VmRSS",)
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.split(":")[0] in wanted)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def middle_and_spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, minimum, maximum."""
    return statistics.median(values), min(values), max(values)
