"""The key of a row."""

from __future__ import annotations

from typing import NamedTuple


class RowKey(NamedTuple):
    """One segment of one sample of one group; samples and segments count from 0."""

    group: str
    sample: int
    segment: int

    def __str__(self) -> str:
        return f"{self.group}/{self.sample}/{self.segment}"
