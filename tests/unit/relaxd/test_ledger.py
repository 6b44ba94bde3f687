"""The audit finds what it must find, and the run files continue where a crash cut them."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from relaxd.run import ledger as ledger_module
from relaxd.run.files import EventLog, JsonLines, read_lines
from relaxd.run.ledger import UNKNOWN, Audit, Ledger, audit
from relaxd.run.summary import overlap_share


def story(*kinds: str, group: str = "g", **detail: Any) -> list[dict[str, Any]]:
    return [{"source": "queue", "revision": i, "kind": kind, "group": group, **detail} for i, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    "kinds",
    [
        ("offered", "leased", "completed", "planned", "trained"),
        ("offered", "leased", "lease_lost", "leased", "completed", "planned", "trained"),
        ("offered", "leased", "completed", "planned", "plan_lost", "sent_back", "leased", "trained"),
        ("offered", "leased", "completed", "dropped"),
        ("offered", "leased", "completed", "planned", "dropped", "trained"),
        ("offered", "leased", "returned"),
        ("offered", "leased", "completed", "planned", "trained", "rolled_back", "offered", "leased", "returned"),
    ],
)
def test_I1_stories_that_may_happen_have_no_fault(kinds: tuple[str, ...]) -> None:
    assert audit(story(*kinds, step=0), ended=True).faults == ()


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (("offered", "leased", "completed", "planned", "trained", "trained"), "is trained and then trained"),
        (("offered", "leased", "completed"), "never ended: it is ready"),
        (("leased",), "is unknown and then leased"),
        (("offered", "leased", "completed", "dropped", "leased"), "is dropped and then leased"),
        (("offered", "leased", "completed", "planned", "trained", "returned"), "is trained and then returned"),
        (("offered", "vanished"), "unknown kind vanished"),
    ],
)
def test_I1_stories_that_must_not_happen_are_named(kinds: tuple[str, ...], words: str) -> None:
    assert any(words in fault for fault in audit(story(*kinds, step=0), ended=True).faults)


PATHS: dict[str, tuple[str, ...]] = {
    UNKNOWN: (),
    "pending": ("offered",),
    "leased": ("offered", "leased"),
    "ready": ("offered", "leased", "completed"),
    "planned": ("offered", "leased", "completed", "planned"),
    "dropped": ("offered", "leased", "dropped"),
    "trained": ("offered", "leased", "trained"),
    "returned": ("offered", "leased", "returned"),
    "rolled_back": ("offered", "leased", "trained", "rolled_back"),
}


def table() -> dict[str, tuple[set[str], str]]:
    """Of each event: the states in which it is allowed, and the one that it leads to; from the module's docstring."""
    lines = [line for line in (ledger_module.__doc__ or "").splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][1:]
    return {
        kind: ({state.strip("() ") for state in allowed.split(",")}, after)
        for kinds, allowed, after in rows
        for kind in kinds.split(", ")
    }


@pytest.mark.parametrize("state", PATHS)
@pytest.mark.parametrize("kind", table())
def test_I1_the_docstring_says_which_event_may_happen_in_which_state(kind: str, state: str) -> None:
    allowed, after = table()[kind]
    assert allowed <= set(PATHS)
    ledger = Ledger()
    for event in story(*PATHS[state], kind):
        assert ledger.faults == [], "the path is a legal one"
        ledger.apply(event)
    assert (ledger.faults == []) == (state in allowed)
    assert ledger.state["g"] == (state if after == "(as before)" else after)
    assert ledger.groups_in(ledger.state["g"]) == (["g"] if ledger.state["g"] != UNKNOWN else [])


def test_groups_are_counted_by_state_and_by_what_ever_happened_to_them() -> None:
    ledger = Ledger()
    for event in [
        *story(
            "offered", "leased", "lease_lost", "leased", "completed", "planned", "trained", "rolled_back", group="a"
        ),
        *story("offered", "leased", group="a"),
        *story("offered", "leased", "dropped", group="b"),
        *story("offered", group="c"),
    ]:
        ledger.apply(event)
    assert ledger.counts() == {
        "pending": 1,
        "leased": 1,
        "dropped": 1,
        "admitted": 2,
        "offered": 3,
        "rolled_back_ever": 1,
        "leases_lost": 1,
    }
    assert [ledger.count(state) for state in ("pending", "ready", "rolled_back")] == [1, 0, 0]
    assert ledger.state.admitted("a")
    assert not ledger.state.admitted("c")


def test_events_of_others_and_of_no_group_leave_the_ledger_alone() -> None:
    ledger = Ledger()
    for event in (
        {"source": "dcs", "revision": 1, "kind": "commit", "lineage": 0, "version": 1, "group": "g"},
        {"source": "queue", "revision": 2, "kind": "closed"},
    ):
        ledger.apply(event)
    assert (ledger.counts(), list(ledger.state), ledger.faults) == (Ledger().counts(), [], [])


def test_the_audit_tells_what_was_committed_and_why_groups_were_dropped() -> None:
    def commit(lineage: int, version: int) -> dict[str, Any]:
        return {"source": "dcs", "revision": version, "kind": "commit", "lineage": lineage, "version": version}

    events = [
        commit(0, 0),
        {"source": "dcs", "revision": 0, "kind": "snapshot", "lineage": 0, "version": 0},
        {"source": "queue", "revision": 0, "kind": "closed", "step": 0},
        *story("offered", "leased", group="a"),
        *story("dropped", group="a", reason="no_signal"),
        *story("offered", "leased", group="b"),
        *story("dropped", group="b", reason="no_signal"),
        *story("offered", "leased", "dropped", group="c"),
        *story("offered", "leased", "completed", "planned", group="d"),
        *story("dropped", group="d", reason="too_stale"),
        *story("trained", group="d", step=0),
        commit(0, 1),
        commit(1, 1),
    ]
    found = audit(events, ended=True, max_staleness=0)
    assert found == Audit(found.counts, {"no_signal": 2, "": 1}, 3, 0, ())
    assert (found.counts["dropped"], found.counts["trained"], found.counts["admitted"]) == (3, 1, 4)


def test_I2_the_staleness_of_a_run_is_that_of_its_stalest_group() -> None:
    events = [
        event
        for group, oldest, step in (("a", 2, 3), ("b", 2, 5), ("c", 4, 4))
        for event in [
            *story("offered", "leased", group=group),
            *story("completed", group=group, oldest_version=oldest),
            *story("planned", "trained", group=group, step=step),
        ]
    ]
    assert audit(events, ended=True).max_staleness == 3
    first = story("offered", "leased", "completed", "trained", oldest_version=0, step=2)
    assert audit(first, ended=True).max_staleness == 2
    masked = story("offered", "leased", "masked", "trained", oldest_trained=0, step=2)
    assert audit(masked, ended=True).max_staleness == 2
    unknown = story("offered", "leased", "completed", "trained", step=7)
    assert audit(unknown, ended=True).max_staleness == 0, "its tokens have no version"


def test_I2_a_mask_counts_for_its_own_group_and_until_it_is_sent_back() -> None:
    begun = story("offered", "leased", "masked", oldest_trained=3) + story("sent_back", "leased")
    trained = story("planned", "trained", step=4)
    assert audit([*begun, *story("completed", oldest_version=2), *trained], ended=True).max_staleness == 2
    fresher = story("offered", "leased", "masked", oldest_trained=1) + story("completed", oldest_version=2)
    assert audit([*fresher, *trained], ended=True).max_staleness == 2, "a mask does not make tokens older"
    later = story("offered", "leased") + story("completed", oldest_version=3) + story("masked", oldest_trained=2)
    assert audit([*later, *trained], ended=True).max_staleness == 1
    other = story("offered", "leased", "masked", group="other", oldest_trained=3)
    own = story("offered", "leased") + story("completed", oldest_version=2)
    assert audit([*other, *own, *trained], ended=False).max_staleness == 2


def test_a_run_that_goes_on_may_have_groups_that_have_not_ended() -> None:
    events = story("offered", "leased", "completed")
    assert audit(events, ended=False).faults == ()
    faults = audit([*events, *story("offered", "leased", group="f")], ended=True).faults
    assert faults == (
        "group f was admitted and never ended: it is leased",
        "group g was admitted and never ended: it is ready",
    )


def test_a_group_that_was_never_leased_needs_no_end() -> None:
    assert audit(story("offered"), ended=True).faults == ()


def test_a_version_committed_twice_is_a_fault() -> None:
    commit = {"source": "dcs", "revision": 1, "kind": "commit", "lineage": 0, "version": 3}
    assert audit([commit, commit], ended=True).faults == ("version (0, 3) was committed twice",)


def test_I2_staleness_is_measured_from_the_oldest_token() -> None:
    events = story("offered", "leased") + story("completed", oldest_version=2) + story("planned", "trained", step=4)
    assert audit(events, ended=True, max_staleness=2).faults == ()
    assert audit(events, ended=True, max_staleness=2).max_staleness == 2
    assert audit(events, ended=True, max_staleness=1).faults == ("a group was trained at staleness 2, the bound is 1",)


def test_I2_a_masked_group_is_as_stale_as_its_oldest_trained_token() -> None:
    begun = story("offered", "leased") + story("completed", oldest_version=2)
    trained = story("planned", "trained", step=4)
    assert audit([*begun, *story("masked", oldest_trained=3), *trained], ended=True).max_staleness == 1
    early = story("offered", "leased", "masked", oldest_trained=3) + story("completed", oldest_version=2)
    assert audit([*early, *trained], ended=True).max_staleness == 1
    again = story("offered", "leased", "masked", oldest_trained=3) + story("lease_lost", "leased")
    assert audit([*again, *story("completed", oldest_version=2), *trained], ended=True).max_staleness == 2
    faults = audit([*begun, *trained, *story("masked", oldest_trained=3)], ended=True).faults
    assert faults == ("revision 0: group g is trained and masked",)


def test_I1_a_quarantined_group_is_dropped_from_the_line() -> None:
    assert audit(story("offered", "leased", "lease_lost", "dropped", reason="quarantined"), ended=True).faults == ()


def test_I1_a_group_is_completed_only_by_the_lease_that_holds_it() -> None:
    """A pending group has no rollout server; an answer for it must have been refused."""
    never = audit(story("offered", "completed"), ended=False).faults
    assert never == ("revision 1: group g is pending and then completed",)
    late = audit(story("offered", "leased", "lease_lost", "completed"), ended=False).faults
    assert late == ("revision 3: group g is pending and then completed",)


def test_a_ledger_tells_groups_apart_by_pass_position_and_repeat() -> None:
    ledger = Ledger()
    ids = ["0/7/0", "1/7/0", "0/7/1", "0/8/0", "g", "0/07/0", "0/x/0"]
    for number, group in enumerate(ids):
        ledger.apply({"source": "queue", "revision": number, "kind": "offered", "group": group})
    ledger.apply({"source": "queue", "revision": 9, "kind": "leased", "group": "0/7/1"})
    assert sorted(ledger.state) == sorted(ids)
    assert sorted(ledger.groups_in("pending")) == sorted(set(ids) - {"0/7/1"})
    assert ledger.groups_in("leased") == ["0/7/1"]
    assert ledger.counts() == {
        "pending": 6,
        "leased": 1,
        "admitted": 1,
        "offered": 7,
        "rolled_back_ever": 0,
        "leases_lost": 0,
    }


def test_a_torn_line_is_cut_off_and_the_source_is_resumed_without_loss_or_repeat(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    events = [
        {"source": "queue", "revision": 1, "kind": "offered", "group": "a"},
        {"source": "queue", "revision": 2, "kind": "planned", "group": "a"},
        {"source": "queue", "revision": 2, "kind": "planned", "group": "b"},
    ]
    for event in events[:2]:
        assert log.append(event)
    log.close()
    with path.open("a") as file:
        file.write('{"source":"queue","revi')
    again = EventLog(path)
    assert again.resume_after("queue") == 1
    assert [again.append(event) for event in events] == [False, False, True]
    again.close()
    assert list(read_lines(path)) == events


def test_a_metrics_file_never_holds_nan(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl")
    with pytest.raises(ValueError, match="JSON"):
        lines.append({"loss": float("nan")})
    lines.append({"loss": 1.0})
    lines.close()
    assert [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [{"loss": 1.0}]


def test_overlap_is_the_share_of_time_in_which_both_go_on() -> None:
    def train(start: float, end: float) -> dict[str, Any]:
        return {"kind": "commit", "metrics": {"train_start_unix_seconds": start, "train_end_unix_seconds": end}}

    def generate(start: float, end: float) -> dict[str, Any]:
        return {"kind": "completed", "generation_start": start, "generation_end": end}

    assert overlap_share([train(0, 4), train(6, 10), generate(3, 5), generate(4, 7)]) == pytest.approx(0.2)
    assert overlap_share([generate(0, 1)]) == 0.0


def test_a_group_takes_about_a_byte() -> None:
    ledger = Ledger()
    count, passes = 10_000, 10
    tracemalloc.start()
    for number in range(passes):
        for position in range(count):
            ledger.state.set(f"{number}/{position}/0", "trained", admitted=True)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size < 2 * count * passes
