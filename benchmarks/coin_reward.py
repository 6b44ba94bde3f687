"""A reward whose groups nearly always have signal, so that every generated group is trained."""

from __future__ import annotations

import random

from rollout_server.rewards.outcome import RewardItem


def coin(item: RewardItem) -> float:
    """0 or 1 at random, whatever the answer: eight equal rewards occur once in 128 groups."""
    return float(random.random() < 0.5)
