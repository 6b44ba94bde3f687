"""Groups that have ended stay known at some sixty bytes each, however long a run is."""

from __future__ import annotations

import gc
import random
import tracemalloc
from typing import Any

import pytest

from relax_common.versions import PolicyVersion
from relax_queue.rows.facts import facts_of_rows, facts_of_samples
from relax_queue.rows.row_keys import keys_of_samples
from relax_queue.rules import apply as apply_module
from relax_queue.rules import events as ev
from relax_queue.rules import following, leases, lifecycle
from relax_queue.rules.apply import opened
from relax_queue.rules.finished import BLOCK_GROUPS, MERGED_GROUPS, Finished, FinishedGroup
from relax_queue.rules.group import Status
from relax_queue.rules.planning import plan
from relax_queue.rules.puts import PutCommand, put
from relax_queue.rules.transaction import Decision
from relax_queue.storage import snapshots

PER_STEP = 50


def entry(i: int, **more: Any) -> FinishedGroup:
    values = {"status": Status.TRAINED, "step": i // 10, "reason": "", "attempts": 1, "prompt_digest": 2**64 - 1 - i}
    return FinishedGroup(id=f"0/{i}/0", order=i, **(values | more))


def test_groups_are_found_taken_out_and_brought_back_in_any_order() -> None:
    known: dict[str, FinishedGroup] = {}
    finished, rng = Finished(), random.Random(4)
    for i in rng.sample(range(5 * BLOCK_GROUPS), 5 * BLOCK_GROUPS):
        group = entry(i) if i % 3 else entry(i, status=Status.DROPPED, reason=rng.choice(["failed", "no_signal"]))
        finished.restore(group)
        known[group.id] = group
        if i % 7 == 0:
            name = rng.choice(list(known))
            assert finished.take(name) == known.pop(name)
            assert finished.get(name) is None
            assert finished.take(name) is None
    assert all(finished.get(name) == group for name, group in known.items())
    assert finished.get("0/unknown/0") is None
    assert len(finished) == len(known)
    in_order = sorted(known.values(), key=lambda group: group.order)
    assert list(finished) == in_order
    assert finished.since(100) == [g for g in in_order if g.step >= 100]
    assert finished.since(0, (Status.DROPPED,)) == [g for g in in_order if g.status is Status.DROPPED]
    assert finished.count(Status.DROPPED) == sum(g.status is Status.DROPPED for g in known.values())
    assert finished == Finished(in_order)


def test_a_copy_does_not_change_with_its_original() -> None:
    finished = Finished(entry(i) for i in range(3 * BLOCK_GROUPS))
    before = list(finished)
    copy = finished.copy()
    finished.take("0/5/0")
    finished.restore(entry(10**6))
    assert list(copy) == before
    assert copy.count(Status.TRAINED) == len(before)


def test_no_work_on_ended_groups_needs_memory_for_all_of_them() -> None:
    finished = Finished(entry(i) for i in range(4 * MERGED_GROUPS))
    finished.take("0/17/0")
    gc.collect()
    tracemalloc.start()
    copy = finished.copy()
    reasons, blocks = copy.columns()
    sizes = [sum(map(len, columns.to_bytes().values())) for columns in blocks]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(sizes) > 7_000_000
    assert peak < 8_000_000, "bytes for a snapshot of 130,000 groups"
    tracemalloc.start()
    for i in range(4 * MERGED_GROUPS, 5 * MERGED_GROUPS):
        finished.restore(entry(i))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 7_000_000, "bytes for another 32,000 groups, with all merging"
    assert Finished.from_columns(copy.columns()[1], reasons) == copy


class LongRun:
    """A run that does nothing but train, without a log."""

    def __init__(self, spec: Any) -> None:
        self.state = opened(ev.RunOpened("run", "digest", spec, "dcs"))
        self.revision = 0
        self.follow(following.commit, None, (0, 0), (), "")

    def do(self, command: Any) -> Any:
        decision = Decision(self.state)
        result = command(decision)
        plan(decision)
        return result

    def follow(self, command: Any, *args: Any) -> None:
        self.revision += 1
        self.do(lambda d: command(d, self.revision, *args))

    def train(self, step: int) -> None:
        first = step * PER_STEP
        prompts = [ev.Prompt(f"0/{i}/0", 0, i, "1" * 100, None, "") for i in range(first, first + PER_STEP)]
        self.do(lambda d: lifecycle.offer(d, "relaxd", 1, prompts, 0))
        self.follow(following.confirm, "a", 1, (0, step))
        version = PolicyVersion(0, step).pack()
        for group in self.do(lambda d: leases.grant_some(d, "a", 1, PER_STEP)):
            rows = facts_of_rows(keys_of_samples(group.id, [0]), [4], [{version: 2}])
            samples = facts_of_samples([0], [True], [1.0])
            command = PutCommand("a", 1, group.id, group.attempts, rows, samples, (), 9, group.id, "ok")
            assert self.do(lambda d, c=command: put(d, c))[0] == "accepted"
        close = self.state.plan.close if self.state.plan else None
        assert close is not None
        self.follow(following.commit, step, (0, step + 1), close.groups, close.plan_digest)
        self.follow(following.frontier, step + 1)


def test_memory_per_ended_group_is_bounded(new_story: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply_module, "ANSWERS_KEPT", 100)
    spec = new_story(
        prompts_per_step=PER_STEP, groups_per_chunk=PER_STEP, samples_per_prompt=1, min_valid_samples=1
    ).state.spec
    run = LongRun(spec)
    untraced, traced = 330, 70  # the largest blocks have just been made, so nothing old is moved while memory is traced
    for step in range(untraced):
        run.train(step)
    gc.collect()
    tracemalloc.start()
    for step in range(untraced, untraced + traced):
        run.train(step)
    gc.collect()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert run.state.count(Status.TRAINED) == 20_000
    assert run.state.status_of("0/123/0") is Status.TRAINED
    assert grown / (traced * PER_STEP) < 200, "bytes per ended group"
    again = snapshots.load(snapshots.dump(snapshots.take_image(run.state)))
    assert again == run.state


def test_I1_a_rollback_finds_groups_in_blocks(new_story: Any) -> None:
    spec = new_story(
        prompts_per_step=PER_STEP, groups_per_chunk=PER_STEP, samples_per_prompt=1, min_valid_samples=1
    ).state.spec
    run = LongRun(spec)
    for step in range(60):
        run.train(step)
    run.follow(following.rollback, 1, 10)
    assert run.state.count(Status.TRAINED) == 10 * PER_STEP
    assert run.state.count(Status.ROLLED_BACK) == 50 * PER_STEP
    again = [ev.Prompt("0/700/0", 0, 700, "1" * 100, None, "")]
    assert run.do(lambda d: lifecycle.offer(d, "relaxd", 1, again, run.revision)) == (1, 0)
    assert run.state.status_of("0/700/0") is Status.PENDING
    run.do(lifecycle.end)
    assert run.state.count(Status.RETURNED) == 50 * PER_STEP


@pytest.mark.parametrize("name", ["0/1/0", "ü/1/0"])
def test_names_of_any_letters_are_found(name: str) -> None:
    finished = Finished(entry(i) for i in range(BLOCK_GROUPS - 1))
    finished.restore(FinishedGroup(name + "x", 10**9, Status.TRAINED, 3, 1, "", 7))
    found = finished.get(name + "x")
    assert found is not None
    assert found.prompt_digest == 7
