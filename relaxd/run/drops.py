"""If groups are dropped and none is trained, the run says so, and ends instead of consuming prompts without end."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from relax_common.errors import Precondition
from relax_common.recipe import Recipe

# Dropped by design: only many more of these in a row mean that something is wrong.
_BY_DESIGN = ("no_signal", "too_stale")
FAILED_GROUPS_MIN = 32
_MEANING = {"no_signal": "all samples of a group got the same reward, so it teaches nothing; look at reward and data"}


@dataclass
class DropStreak:
    """Counts, from queue events, the groups dropped since one was planned or trained."""

    failed_max: int
    """How many groups in a row may fail (reward, timeout, ...) before the run ends."""
    untrained_max: int
    """How many groups in a row may be dropped, for any reason, before the run ends."""
    failed: int = 0
    last_failure: str = ""
    dropped: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def of_recipe(recipe: Recipe) -> DropStreak:
        return DropStreak(
            failed_max=max(FAILED_GROUPS_MIN, 2 * recipe.prompts_per_step),
            untrained_max=recipe.dropped_steps_max * recipe.prompts_per_step,
        )

    def see_event(self, event: dict[str, Any]) -> None:
        if event["kind"] in ("planned", "trained"):
            self.failed = 0
            self.dropped.clear()
        elif event["kind"] == "dropped":
            reason = event.get("reason", "")
            self.dropped[re.split(r"[;:]", reason)[0]] += 1
            if reason.startswith(_BY_DESIGN):
                self.failed = 0
            else:
                self.failed += 1
                self.last_failure = reason

    def check(self) -> None:
        """Raises Precondition with the reason once too many groups in a row were dropped."""
        if self.failed >= self.failed_max:
            raise Precondition(
                f"{self.failed} groups in a row failed and none succeeded; the last one: {self.last_failure}"
            )
        total = self.dropped.total()
        if total >= self.untrained_max:
            main = self.dropped.most_common(1)[0][0]
            meaning = f" ({_MEANING[main]})" if main in _MEANING else ""
            raise Precondition(
                f"{total} groups in a row were dropped and none was trained: {self.line()}{meaning}; "
                "dropped_steps_max in the recipe allows more"
            )

    def line(self) -> str:
        """Counts by reason, most frequent first."""
        return ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())
