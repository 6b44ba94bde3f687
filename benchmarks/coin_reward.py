"""A reward whose groups nearly always have signal, so that every generated group is trained."""

from __future__ import annotations

import zlib

from rollout_server.rewards.outcome import RewardItem


def coin(item: RewardItem) -> float:
    """0 or 1 by a hash of prompt and response: reproducible, and blind to what is right."""
    return float(zlib.crc32(f"{item.prompt}|{item.response}".encode()) & 1)
