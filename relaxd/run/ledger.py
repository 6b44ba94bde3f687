"""I1 from events alone: where each group is, and whether its story is one that may happen.

| event | allowed in | leads to |
|---|---|---|
| offered | (unknown), rolled_back | pending |
| leased | pending | leased |
| completed | leased | ready |
| lease_lost, sent_back | leased, ready, planned | pending |
| planned | ready | planned |
| plan_lost | planned | ready |
| masked | leased, ready | (as before) |
| dropped | pending, leased, ready, planned | dropped |
| trained | any but trained, returned | trained |
| returned | pending, leased, ready, planned, rolled_back | returned |
| rolled_back | trained, dropped | rolled_back |

`trained` wins over whatever became of the group since it was planned: its commit is the commit point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

UNKNOWN = "unknown"

_MOVES: dict[str, tuple[frozenset[str], str]] = {
    "offered": (frozenset({UNKNOWN, "rolled_back"}), "pending"),
    "leased": (frozenset({"pending"}), "leased"),
    "completed": (frozenset({"leased"}), "ready"),
    "lease_lost": (frozenset({"leased", "ready", "planned"}), "pending"),
    "sent_back": (frozenset({"leased", "ready", "planned"}), "pending"),
    "planned": (frozenset({"ready"}), "planned"),
    "plan_lost": (frozenset({"planned"}), "ready"),
    "dropped": (frozenset({"pending", "leased", "ready", "planned"}), "dropped"),
    "trained": (frozenset({"pending", "leased", "ready", "planned", "dropped"}), "trained"),
    "returned": (frozenset({"pending", "leased", "ready", "planned", "rolled_back"}), "returned"),
    "rolled_back": (frozenset({"trained", "dropped"}), "rolled_back"),
}
ENDS = ("trained", "dropped", "returned")


@dataclass
class Ledger:
    """Fold of a run's queue events; `faults` names each move that must not happen."""

    state: dict[str, str] = field(default_factory=dict)
    admitted: set[str] = field(default_factory=set)
    drop_reasons: dict[str, str] = field(default_factory=dict)
    rolled_back_ever: int = 0
    leases_lost: int = 0
    faults: list[str] = field(default_factory=list)
    _groups_in: Counter[str] = field(default_factory=Counter)
    """How many groups are in each state: `state` grows with the run, and counts are asked for all the time."""

    def apply(self, event: dict[str, Any]) -> None:
        group, kind = event.get("group"), event["kind"]
        if event["source"] != "queue" or not group:
            return
        if kind == "masked":
            self._check_masked(event)
            return
        if kind not in _MOVES:
            self.faults.append(f"revision {event['revision']}: unknown kind {kind} for group {group}")
            return
        allowed, after = _MOVES[kind]
        before = self.state.get(group, UNKNOWN)
        if before not in allowed:
            self.faults.append(f"revision {event['revision']}: group {group} is {before} and then {kind}")
        self.state[group] = after
        self._groups_in[after] += 1
        if before != UNKNOWN:
            self._groups_in[before] -= 1
        if kind == "leased":
            self.admitted.add(group)
        elif kind == "dropped":
            self.drop_reasons[group] = event.get("reason", "")
        elif kind == "rolled_back":
            self.rolled_back_ever += 1
        elif kind == "lease_lost":
            self.leases_lost += 1

    def _check_masked(self, event: dict[str, Any]) -> None:
        if self.state.get(event["group"]) not in ("leased", "ready"):
            self.faults.append(
                f"revision {event['revision']}: group {event['group']} is {self.state.get(event['group'])} and masked"
            )

    def count(self, state: str) -> int:
        return self._groups_in[state]

    def groups_in(self, state: str) -> list[str]:
        if not self.count(state):
            return []
        return [group for group, at in self.state.items() if at == state]

    def counts(self) -> dict[str, int]:
        """Groups by state, plus how many were ever admitted or rolled back."""
        return {
            **+self._groups_in,
            "admitted": len(self.admitted),
            "offered": len(self.state),
            "rolled_back_ever": self.rolled_back_ever,
            "leases_lost": self.leases_lost,
        }


@dataclass(frozen=True)
class Audit:
    """Result over a finished run's events. `faults` is empty where I1 holds."""

    counts: dict[str, int]
    dropped_by_reason: dict[str, int]
    commits: int
    max_staleness: int
    faults: tuple[str, ...]


def audit(events: Iterable[dict[str, Any]], *, ended: bool, max_staleness: int | None = None) -> Audit:
    """Replay events.jsonl: every admitted group ends once, every commit is unique, staleness stays within its bound."""
    ledger = Ledger()
    faults: list[str] = []
    versions: set[tuple[int, int]] = set()
    commits = 0
    staleness = 0
    oldest: dict[str, int] = {}
    masked: dict[str, int] = {}
    for event in events:
        ledger.apply(event)
        if event["source"] == "dcs" and event["kind"] == "commit":
            version = (event["lineage"], event["version"])
            if version in versions:
                faults.append(f"version {version} was committed twice")
            versions.add(version)
            commits += 1
        elif event["kind"] == "completed" and event.get("oldest_version") is not None:
            oldest[event["group"]] = max(event["oldest_version"], masked.get(event["group"], 0))
        elif event["kind"] == "masked":
            masked[event["group"]] = event["oldest_trained"]
            oldest[event["group"]] = max(oldest.get(event["group"], 0), event["oldest_trained"])
        elif event["kind"] in ("lease_lost", "sent_back"):
            masked.pop(event["group"], None)
        elif event["kind"] == "trained" and event.get("group") in oldest:
            staleness = max(staleness, event["step"] - (oldest[event["group"]] & 0xFFFFFFFF))
    faults += ledger.faults
    if max_staleness is not None and staleness > max_staleness:
        faults.append(f"a group was trained at staleness {staleness}, the bound is {max_staleness}")
    if ended:
        faults += [
            f"group {group} was admitted and never ended: it is {ledger.state[group]}"
            for group in sorted(ledger.admitted)
            if ledger.state[group] not in ENDS
        ]
    reasons = Counter(ledger.drop_reasons[group] for group in ledger.groups_in("dropped"))
    return Audit(ledger.counts(), dict(reasons), commits, staleness, tuple(faults))
