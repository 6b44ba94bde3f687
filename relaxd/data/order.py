"""The order in which a run visits its rows, and the ids that remember it."""

from __future__ import annotations

import random


def visit_order(rows: int, seed: int, pass_: int, shuffle: bool) -> list[int]:
    """Row indices of one pass; a pure function, so a restarted feeder continues where it was."""
    order = list(range(rows))
    if shuffle:
        random.Random(f"{seed}/{pass_}").shuffle(order)
    return order


def group_id(pass_: int, position: int, repeat: int = 0) -> str:
    return f"{pass_}/{position}/{repeat}"


def parse_group_id(group: str) -> tuple[int, int]:
    """(pass, position)"""
    pass_, position, _ = group.split("/")
    return int(pass_), int(position)
