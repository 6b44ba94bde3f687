"""What the clients of one campaign saw, and the independent check of it: nothing here is the queue's own code.

A fault is a sentence. The rules are those of the ledger and the step commit, read from outside: what was answered, what
was read, what the dcs log says, what the event stream says.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

MOVES = {
    "offered": ({"none"}, "pending"),
    "leased": ({"pending"}, "leased"),
    "completed": ({"leased"}, "ready"),
    "lease_lost": ({"leased", "ready", "planned"}, "pending"),
    "sent_back": ({"leased", "ready", "planned"}, "pending"),
    "planned": ({"ready"}, "planned"),
    "plan_lost": ({"planned"}, "ready"),
    "masked": ({"leased", "ready"}, ""),
    "dropped": ({"pending", "leased", "ready", "planned"}, "dropped"),
    "trained": ({"pending", "leased", "ready", "planned", "dropped"}, "trained"),
    "returned": ({"pending", "leased", "ready", "planned"}, "returned"),
}
ENDS = ("trained", "dropped", "returned")


@dataclass
class History:
    """Appended to by all client threads."""

    full: bool
    max_staleness: int
    masks: bool
    lock: threading.Lock = field(default_factory=threading.Lock)
    offered: list[str] = field(default_factory=list)
    leases: list[tuple[str, int, str, int]] = field(default_factory=list)  # group, attempt, server, deadline
    puts: list[dict[str, Any]] = field(default_factory=list)
    plans: list[tuple[str, int, int, int, str]] = field(default_factory=list)  # who, step, generation, chunk, content
    reads: list[dict[str, Any]] = field(default_factory=list)
    commits: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)

    def add(self, where: str, entry: Any) -> None:
        with self.lock:
            getattr(self, where).append(entry)


def check(h: History) -> list[str]:
    """Every way in which the history is not that of a correct queue."""
    faults = list(h.faults)
    faults += _check_leases(h)
    faults += _check_plans(h)
    faults += _check_commits(h)
    faults += _check_reads(h)
    state, reasons, stream_faults = _fold_events(h)
    faults += stream_faults
    faults += _check_end(h, state, reasons)
    if h.full:
        faults += _check_full(h)
    return faults


def _check_leases(h: History) -> list[str]:
    twice = [key for key, n in Counter((g, a) for g, a, _, _ in h.leases).items() if n > 1]
    return [f"lease {group}/{attempt} was granted twice" for group, attempt in twice]


def _check_plans(h: History) -> list[str]:
    faults, known = [], {}
    for who, step, generation, chunk, content in h.plans:
        first = known.setdefault((step, generation, chunk), content)
        if first != content:
            faults.append(f"chunk {chunk} of step {step}, generation {generation}: {who} read another plan")
    return faults


def _check_commits(h: History) -> list[str]:
    faults = []
    steps = [c["step"] for c in h.commits]
    if steps != list(range(len(steps))):
        faults.append(f"steps were committed in the order {steps}")
    for group, n in Counter(g for c in h.commits for g in c["groups"]).items():
        if n > 1:
            faults.append(f"group {group} was trained {n} times")
    oldest = {(p["group"], p["attempt"]): p["version"] for p in h.puts if p.get("answer") == "accepted"}
    for commit in h.commits:
        for group, attempt in commit["attempts"].items():
            version = oldest.get((group, attempt))
            if version is not None and not h.masks and commit["step"] - version > h.max_staleness:
                faults.append(f"group {group} of version {version} was trained in step {commit['step']}")
    return faults


def _check_reads(h: History) -> list[str]:
    """Rows carry the content that was put under the attempt they name, all rows of a sample under one attempt."""
    asked = defaultdict(set)
    for put in h.puts:
        for sample in put["samples"]:
            asked[put["group"], sample].add(put["attempt"])
    faults = []
    for read in h.reads:
        for (group, sample), attempt in read["attempts"].items():
            if attempt not in asked[group, sample]:
                faults.append(f"sample {sample} of group {group}: rows of attempt {attempt} were never put")
    return faults


def _fold_events(h: History) -> tuple[dict[str, str], dict[str, str], list[str]]:
    state: dict[str, str] = {}
    reasons: dict[str, str] = {}
    faults: list[str] = []
    revision, heads = 0, []
    for event in h.events:
        if event["revision"] < revision:
            faults.append(f"revision {event['revision']} came after {revision}")
        revision = event["revision"]
        if event["kind"] == "head":
            heads.append(json.loads(event["detail"])["version"])
        group = event["group"]
        if not group:
            continue
        allowed, after = MOVES[event["kind"]]
        before = state.get(group, "none")
        if before not in allowed:
            faults.append(f"revision {revision}: group {group} is {before} and then {event['kind']}")
        state[group] = after or before
        if event["kind"] == "dropped":
            reasons[group] = json.loads(event["detail"])["reason"]
    if heads != list(range(len(heads))):
        faults.append(f"the head moved through {heads}")
    if len(heads) != len(h.commits) + 1:
        faults.append(f"{len(h.commits)} steps were committed, the head moved {len(heads)} times")
    return state, reasons, faults


def _check_end(h: History, state: dict[str, str], reasons: dict[str, str]) -> list[str]:
    faults = [f"group {g} was offered and is not in the event stream" for g in h.offered if g not in state]
    faults += [f"group {g} never ended: it is {s}" for g, s in state.items() if s not in ENDS]
    trained = {g for c in h.commits for g in c["groups"]}
    by_events = {g for g, s in state.items() if s == "trained"}
    faults += [
        f"group {g} is trained by {'the log' if g in trained else 'the events'} only" for g in trained ^ by_events
    ]
    counted = {
        "trained": len(trained),
        "returned": sum(s == "returned" for s in state.values()),
        "offered": len(state),
        "dropped": dict(Counter(reasons[g] for g, s in state.items() if s == "dropped")),
    }
    faults += [f"{k}: the queue counts {h.counts[k]}, the history {n}" for k, n in counted.items() if h.counts[k] != n]
    return faults


def _check_full(h: History) -> list[str]:
    """With the payload on disk nothing that was acknowledged is ever generated or planned again."""
    faults = [f"the plan of step {s} got generation {n}" for _, s, n, _, _ in h.plans if n != 1]
    for event in h.events:
        if "payload_lost" in event["detail"] or event["kind"] == "plan_lost":
            faults.append(f"revision {event['revision']}: {event['kind']} of {event['group']} ({event['detail']})")
    accepted = {p["group"]: p["attempt"] for p in h.puts if p.get("answer") == "accepted" and p["outcome"] == "ok"}
    for group, attempt, _, _ in h.leases:
        if attempt > accepted.get(group, attempt):
            faults.append(f"group {group} was accepted under attempt {accepted[group]} and leased again as {attempt}")
    return faults
