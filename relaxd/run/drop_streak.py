"""When every group fails, the run must end with the reason instead of burning prompts for ever."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relax_common.errors import Precondition

# Dropped by design, however many in a row.
_HARMLESS = ("no_signal", "too_stale")
GROUPS_MIN = 32


@dataclass
class FailureStreak:
    """Fold of queue events: groups dropped as failed since any group was good."""

    limit: int
    groups: int = 0
    reason: str = ""

    @staticmethod
    def for_step_of(prompts_per_step: int) -> FailureStreak:
        return FailureStreak(max(GROUPS_MIN, 2 * prompts_per_step))

    def see_event(self, event: dict[str, Any]) -> None:
        if event["kind"] == "dropped" and not event.get("reason", "").startswith(_HARMLESS):
            self.groups += 1
            self.reason = event.get("reason", "")
        elif event["kind"] in ("planned", "trained", "dropped"):
            self.groups = 0

    def check(self) -> None:
        """Raises Precondition once `limit` groups in a row have failed."""
        if self.groups >= self.limit:
            raise Precondition(f"{self.groups} groups in a row failed and none was good, the last one: {self.reason}")
