"""A run whose groups are all dropped ends with the reason, sooner if they failed than if they taught nothing."""

from __future__ import annotations

from typing import Any

import pytest

from relax_common.errors import Precondition
from relaxd.run.drops import DropStreak


def dropped(reason: str) -> dict[str, Any]:
    return {"source": "queue", "kind": "dropped", "reason": reason}


def test_a_streak_of_failures_is_named_with_its_last_reason() -> None:
    streak = DropStreak(failed_max=32, untrained_max=1000)
    for _ in range(31):
        streak.see_event(dropped("0 of 8 rewards are valid (error); RuntimeError: broken"))
    streak.check()
    streak.see_event(dropped("0 of 8 rewards are valid (error); RuntimeError: broken"))
    with pytest.raises(Precondition, match="32 groups in a row failed"):
        streak.check()


def test_one_good_group_or_one_without_signal_breaks_the_streak() -> None:
    for event in ({"source": "queue", "kind": "planned"}, dropped("no_signal")):
        streak = DropStreak(failed_max=2, untrained_max=1000)
        streak.see_event(dropped("x"))
        streak.see_event(event)
        streak.see_event(dropped("x"))
        streak.check()


def test_groups_without_signal_end_the_run_once_too_many_in_a_row_were_dropped() -> None:
    streak = DropStreak(failed_max=2, untrained_max=6)
    for _ in range(4):
        streak.see_event(dropped("no_signal"))
    streak.see_event(dropped("too_stale: 3 versions"))
    streak.check()
    assert streak.line() == "4 no_signal, 1 too_stale"
    streak.see_event(dropped("no_signal"))
    with pytest.raises(Precondition, match=r"6 groups in a row were dropped .* 5 no_signal, 1 too_stale .*same reward"):
        streak.check()


def test_a_group_that_is_planned_starts_the_count_again() -> None:
    streak = DropStreak(failed_max=2, untrained_max=3)
    for _ in range(10):
        streak.see_event(dropped("no_signal"))
        streak.see_event(dropped("no_signal"))
        streak.see_event({"source": "queue", "kind": "planned"})
        streak.check()
    assert streak.line() == ""
