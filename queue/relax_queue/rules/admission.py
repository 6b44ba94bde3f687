"""Admission by deadline (I3): pure functions over the open set. Nothing is counted, so no resume can burst."""

from collections.abc import Iterable, Sequence


def fits(deadlines: Iterable[int], head: int, prompts_per_step: int, taken: int = 0) -> bool:
    """Can all open groups still be trained in time?

    In order of deadline they fill the coming steps `prompts_per_step` at a time; `taken` places of step `head` are
    planned already. True if none is trained in a step after its deadline.
    """
    return all(head + (taken + i) // prompts_per_step <= d for i, d in enumerate(sorted(deadlines)))


def first_late(deadlines: Sequence[int], head: int, prompts_per_step: int, taken: int = 0) -> int | None:
    """Index of the first group that cannot be trained in time; `deadlines` is sorted."""
    for i, deadline in enumerate(deadlines):
        if head + (taken + i) // prompts_per_step > deadline:
            return i
    return None


def deadline(confirmed: int, oldest_kept: int | None, max_staleness: int) -> int:
    """Last step that may train a group: min(version confirmed at the lease, its oldest kept token) + max_staleness."""
    oldest = confirmed if oldest_kept is None else min(confirmed, oldest_kept)
    return oldest + max_staleness


def on_line(line: Sequence[int], lineage: int, number: int) -> bool:
    """Is version (lineage, number) the head or an ancestor of it? `line[v]` is the lineage that made version v."""
    return 0 <= number < len(line) and line[number] == lineage
