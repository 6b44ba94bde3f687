"""Checks I1 from events alone: where each group is, and whether its history is a legal one.

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
| trained | pending, leased, ready, planned, dropped | trained |
| returned | pending, leased, ready, planned, rolled_back | returned |
| rolled_back | trained, dropped | rolled_back |

`trained` overrides whatever happened to the group after it was planned: its commit is the commit point.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
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
_STATES = (UNKNOWN, *sorted({after for _, after in _MOVES.values()}))
_ADMITTED = 0x80


class GroupStates:
    """State of every group, one byte each: a run may have millions, and the controller holds them all.

    Ids of the feeder (pass/position/repeat) are kept in an array per pass and repeat; others, if any, in a dictionary.
    """

    def __init__(self) -> None:
        self._pages: dict[tuple[str, str], bytearray] = {}
        self._others: dict[str, int] = {}

    def __getitem__(self, group: str) -> str:
        return _STATES[self._code(group) & ~_ADMITTED]

    def admitted(self, group: str) -> bool:
        return bool(self._code(group) & _ADMITTED)

    def set(self, group: str, state: str, *, admitted: bool) -> None:
        code = _STATES.index(state) | (_ADMITTED if admitted else 0)
        place = _place(group)
        if place is None:
            self._others[group] = code
            return
        page = self._pages.setdefault(place[0], bytearray())
        if place[1] >= len(page):
            page.extend(bytes(place[1] + 1 - len(page)))
        page[place[1]] = code

    def _code(self, group: str) -> int:
        place = _place(group)
        if place is None:
            return self._others.get(group, 0)
        page = self._pages.get(place[0], b"")
        return page[place[1]] if place[1] < len(page) else 0

    def __iter__(self) -> Iterator[str]:
        """All groups ever offered."""
        yield from self._others
        for (number, repeat), page in self._pages.items():
            yield from (f"{number}/{position}/{repeat}" for position, code in enumerate(page) if code)


def _place(group: str) -> tuple[tuple[str, str], int] | None:
    parts = group.split("/")
    if len(parts) != 3 or not re.fullmatch(r"0|[1-9][0-9]{0,8}", parts[1]):
        return None
    return (parts[0], parts[2]), int(parts[1])


@dataclass
class Ledger:
    """Fold of a run's queue events; `faults` names each move that must not happen."""

    state: GroupStates = field(default_factory=GroupStates)
    admitted: int = 0
    offered: int = 0
    rolled_back_ever: int = 0
    leases_lost: int = 0
    faults: list[str] = field(default_factory=list)
    _groups_in: Counter[str] = field(default_factory=Counter)
    """How many groups are in each state, kept up to date because counts are needed all the time."""

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
        before, admitted = self.state[group], self.state.admitted(group)
        if before not in allowed:
            self.faults.append(f"revision {event['revision']}: group {group} is {before} and then {kind}")
        self.state.set(group, after, admitted=admitted or kind == "leased")
        self._groups_in[after] += 1
        if before == UNKNOWN:
            self.offered += 1
        else:
            self._groups_in[before] -= 1
        if kind == "leased" and not admitted:
            self.admitted += 1
        elif kind == "rolled_back":
            self.rolled_back_ever += 1
        elif kind == "lease_lost":
            self.leases_lost += 1

    def _check_masked(self, event: dict[str, Any]) -> None:
        state = self.state[event["group"]]
        if state not in ("leased", "ready"):
            self.faults.append(f"revision {event['revision']}: group {event['group']} is {state} and masked")

    def count(self, state: str) -> int:
        return self._groups_in[state]

    def groups_in(self, state: str) -> list[str]:
        if not self.count(state):
            return []
        return [group for group in self.state if self.state[group] == state]

    def counts(self) -> dict[str, int]:
        """Groups by state, plus how many were ever admitted or rolled back."""
        return {
            **+self._groups_in,
            "admitted": self.admitted,
            "offered": self.offered,
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
    drop_reasons: dict[str, str] = {}
    for event in events:
        ledger.apply(event)
        if event["source"] == "queue" and event["kind"] == "dropped":
            drop_reasons[event["group"]] = event.get("reason", "")
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
            staleness = max(staleness, event["step"] - oldest[event["group"]])
    faults += ledger.faults
    if max_staleness is not None and staleness > max_staleness:
        faults.append(f"a group was trained at staleness {staleness}, the bound is {max_staleness}")
    if ended:
        faults += [
            f"group {group} was admitted and never ended: it is {ledger.state[group]}"
            for group in sorted(ledger.state)
            if ledger.state.admitted(group) and ledger.state[group] not in ENDS
        ]
    reasons = Counter(drop_reasons[group] for group in ledger.groups_in("dropped"))
    return Audit(ledger.counts(), dict(reasons), commits, staleness, tuple(faults))
