"""A run whose groups all fail ends with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from relax_common.errors import Precondition
from relaxd.run.drop_streak import FailureStreak


def dropped(reason: str) -> dict[str, Any]:
    return {"source": "queue", "kind": "dropped", "reason": reason}


def test_a_streak_of_failures_is_named_with_its_last_reason() -> None:
    streak = FailureStreak.for_step_of(4)
    for _ in range(31):
        streak.see_event(dropped("0 of 8 rewards are valid (error); RuntimeError: broken"))
    streak.check()
    streak.see_event(dropped("0 of 8 rewards are valid (error); RuntimeError: broken"))
    with pytest.raises(Precondition, match="32 groups in a row failed"):
        streak.check()


def test_one_good_group_or_one_without_signal_breaks_the_streak() -> None:
    for event in ({"source": "queue", "kind": "planned"}, dropped("no_signal")):
        streak = FailureStreak(2)
        streak.see_event(dropped("x"))
        streak.see_event(event)
        streak.see_event(dropped("x"))
        streak.check()
