"""kill -9 at named points of real processes: every admitted group ends once, no version is committed twice."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STEPS = 8
TP2 = "actor.tensor_parallel_size=2"


def trained_once(events: list[dict[str, Any]]) -> None:
    """Without a rollback each group is in exactly one commit record, and steps follow one another."""
    commits = [event for event in events if event["source"] == "dcs" and event["kind"] == "commit"]
    groups = [group for commit in commits for group in commit["groups"]]
    assert len(groups) == len(set(groups))
    assert [commit["version"] for commit in commits] == list(range(STEPS + 1))


@pytest.mark.parametrize(
    "point",
    [
        "actor.after_optimizer_step",
        "actor.after_last_push",
        "actor.after_commit_sent_before_answer",
        "actor.after_commit_heard",
    ],
)
def test_I1_a_killed_actor_loses_and_repeats_nothing(start_run: Callable, point: str) -> None:
    run = start_run(f"{point}=kill@4")
    result = run.finish()
    assert run.fired_points() == {point}
    assert result.counts["rolled_back_ever"] == 0
    trained_once(run.events())


@pytest.mark.parametrize("point", ["actor.after_commit_sent_before_answer", "actor.after_commit_heard"])
def test_I1_a_killed_rank_of_two_restarts_the_role(start_run: Callable, point: str) -> None:
    run = start_run(f"{point}=kill@4", TP2)
    result = run.finish()
    assert run.fired_points() == {point}
    assert result.counts["rolled_back_ever"] == 0
    trained_once(run.events())


def test_I1_a_rollout_server_killed_after_3_of_8_samples_returns_its_groups(start_run: Callable) -> None:
    run = start_run("rollout.after_n_samples=kill@43")
    result = run.finish()
    assert run.fired_points() == {"rollout.after_n_samples"}
    assert result.counts["leases_lost"] > 0
    trained_once(run.events())


def test_I6_an_engine_killed_in_mid_swap_serves_again_only_after_verification(start_run: Callable) -> None:
    run = start_run("rollout.mid_swap=kill@3")
    run.finish()
    assert run.fired_points() == {"rollout.mid_swap"}
    terms = {event["term"] for event in run.events() if event["kind"] == "confirmed"}
    assert terms == {"1", "2"}
    trained_once(run.events())


@pytest.mark.parametrize(
    ("point", "durability"),
    [("queue.before_apply_commit=kill@4", "metadata"), ("queue.after_apply_commit=kill@4", "full")],
)
def test_I1_a_killed_queue_recovers_from_its_log(start_run: Callable, point: str, durability: str) -> None:
    run = start_run(point, f"queue.durability={durability}")
    result = run.finish()
    assert run.fired_points() == {point.partition("=")[0]}
    assert result.counts["rolled_back_ever"] == 0
    trained_once(run.events())
    lost = [e for e in run.events() if e.get("reason") == "payload_lost" or e["kind"] == "plan_lost"]
    assert durability == "metadata" or not lost, "rows and plan survive, no group is generated again"


@pytest.mark.parametrize("point", ["dcs.commit_before_fsync=kill@4", "dcs.commit_after_fsync=kill@4"])
def test_I1_a_killed_dcs_commits_once_or_not_at_all(start_run: Callable, point: str) -> None:
    run = start_run(point)
    result = run.finish()
    assert run.fired_points() == {point.partition("=")[0]}
    assert result.counts["rolled_back_ever"] == 0
    trained_once(run.events())


def test_I1_relaxd_killed_in_mid_step_is_restarted_and_the_run_goes_on(start_run: Callable) -> None:
    run = start_run("")
    run.wait_for("four commits", lambda: sum(e["kind"] == "commit" for e in _events_so_far(run)) >= 4)
    address = (run.run_dir / "relaxd.address").read_text().strip()
    os.kill(_pid_listening_on(address), signal.SIGKILL)
    result = run.finish()
    assert result.counts["rolled_back_ever"] == 0
    trained_once(run.events())
    starts = (run.run_dir / "logs" / "relaxd.log").read_text().count('"event": "serving"')
    assert starts == 2


def test_I8_a_frozen_actor_that_wakes_after_its_replacement_gets_stale_term_and_exits(start_run: Callable) -> None:
    run = start_run("actor.after_optimizer_step=stop@4", RELAX_RELAXD__TTL_SECONDS="4")
    marker = run.fired / "actor.after_optimizer_step.fired"
    run.wait_for("the freeze", marker.exists)
    pid = int(marker.read_text().split()[0])
    run.wait_for("the replacement's commit", lambda: _commit_of_term(run, 2))
    os.kill(pid, signal.SIGCONT)
    log = run.run_dir / "logs" / "actor-0.log"
    run.wait_for("the exit of the frozen actor", lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid))
    # It hears it first from relaxd, by a heartbeat, or from dcs or the queue, by the call before which it was frozen.
    assert re.search(r"term 1( of \S+)? is over", log.read_text())
    run.finish()
    trained_once(run.events())


def _commit_of_term(run: Any, term: int) -> bool:
    return any(event["kind"] == "commit" and event["term"] == term for event in _events_so_far(run))


def _events_so_far(run: Any) -> list[dict[str, Any]]:
    paths = list(run.folder.glob("runs/*/events.jsonl"))
    if not paths:
        return []
    return [json.loads(line) for line in paths[0].read_text().splitlines(keepends=True) if line.endswith("\n")]


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _pid_listening_on(address: str) -> int:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"relaxd" in command and address.encode() in command:
            return int(path.parent.name)
    raise AssertionError(f"no relaxd listens on {address}")
