"""Faults that were planted in the rules one by one, and that no test had noticed: each has its test here."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_common.errors import AlreadyExists, InvalidInput
from relax_common.rows import Field
from relax_common.storage.framed_log import FramedLog
from relax_common.versions import PolicyVersion
from relax_queue.rows.row_keys import keys_of
from relax_queue.rules import following, leases, lifecycle
from relax_queue.rules.group import Group, Status
from relax_queue.rules.planning import closing_due, late_groups, plan_digest, run_over
from relax_queue.rules.state import Phase
from relax_queue.rules.transaction import fence

V0, V1, V2 = PolicyVersion(0, 0), PolicyVersion(0, 1), PolicyVersion(0, 2)


def test_the_log_is_fsynced_before_a_flush_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    log = FramedLog(tmp_path / "log")
    assert list(log.replay()) == []
    log.append(b"one")
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.fstat(fd).st_ino))
    log.flush()
    assert synced == [(tmp_path / "log").stat().st_ino]


@pytest.mark.parametrize(("refills", "drops", "closes_with"), [(0, 0, 3), (0, 1, 2), (1, 1, 3), (1, 2, 2), (2, 2, 3)])
def test_refills_are_counted_before_a_step_closes_short(
    new_story: Any, refills: int, drops: int, closes_with: int
) -> None:
    story = new_story(max_staleness=0, prompts_per_step=3, groups_per_chunk=3, max_refills_per_step=refills, groups=9)
    for _ in range(drops):
        assert story.put(story.lease(), outcome="no_signal") == "dropped"
    made = 0
    while (plan := story.plan_of(0)) is None or plan.close is None:
        story.make()
        made += 1
    assert made == closes_with
    assert plan.close.short_reason == ("" if closes_with == 3 else "refills_used_up")


@pytest.mark.parametrize(("version", "disposition"), [(V1, "accepted"), (V0, "sent_back")])
def test_I2_a_put_whose_oldest_token_is_one_version_too_old_is_sent_back(
    new_story: Any, version: PolicyVersion, disposition: str
) -> None:
    """With max_staleness 1 the lease at version 2 has deadline 3, so its tokens may not be older than version 2."""
    story = new_story(max_staleness=1, groups=6)
    story.make()
    story.commit(1, ("g0",), story.digest())
    story.confirm("a", V1)
    group = story.lease()
    assert group.deadline == 2
    assert story.put(group, tokens={V1: 3, version: 1}) == disposition
    assert (story.status(group.id) is Status.PENDING) == (disposition == "sent_back")


@pytest.mark.parametrize(("valid", "disposition"), [(2, "accepted"), (1, "dropped")])
def test_I11_the_broker_drops_a_group_with_too_few_valid_samples(new_story: Any, valid: int, disposition: str) -> None:
    story = new_story(samples_per_prompt=3, min_valid_samples=2)
    group = story.lease()
    first = tuple(range(valid))
    assert story.put(group, samples=first, outcome=None) == "accepted"
    assert story.put(group, samples=tuple(range(valid, 3)), valid=False) == disposition
    reasons = {} if disposition == "accepted" else {"too_few_valid_samples": 1}
    assert story.state.dropped_by_reason == reasons


def test_I3_ready_groups_are_taken_in_order_of_deadline(new_story: Any) -> None:
    """g1 was offered later than g0 but has to be trained earlier."""
    story = new_story(max_staleness=2, groups=6, prompts_per_step=1)
    first = story.make()
    assert story.state.plan is not None
    late, early = story.lease("a"), story.lease("b")
    assert (first.id, late.id, early.id) == ("g0", "g1", "g2")
    late.deadline, early.deadline = 2, 1
    assert story.put(late, V0) == "accepted"
    assert story.put(early, V0) == "accepted"
    story.commit(1, ("g0",), story.digest())
    assert story.state.plan.groups() == ["g2"]


def test_I1_a_superseded_lease_keeps_its_complete_samples(new_story: Any) -> None:
    story = new_story()
    group = story.lease()
    assert story.put(group, samples=(0,), outcome=None) == "accepted"
    story.do(lambda d: fence(d, "a", 2))
    assert story.status(group.id) is Status.PENDING
    assert set(story.state.group(group.id).samples) == {0}
    story.confirm("a", V0, term=2)
    again = story.lease(term=2)
    assert isinstance(again, Group)
    assert (again.id, set(again.samples)) == (group.id, {0})
    assert story.put(again, samples=(1,)) == "accepted"


def test_I6_a_rollback_voids_confirmations_off_the_line_only(new_story: Any) -> None:
    story = new_story(max_staleness=1, snapshot_every=2, groups=6)
    story.make()
    story.commit(1, ("g0",), story.digest())
    story.confirm("a", V1)
    assert set(story.state.confirmed) == {"a", "b"}
    story.record(following.rollback, 1, 0)
    assert set(story.state.confirmed) == {"b"}, "b serves version 0, which is still on the line"
    refused = story.lease("a")
    assert refused.reason == "unconfirmed"
    assert isinstance(story.lease("b"), Group)


@pytest.mark.parametrize("credits", [1, 2])
def test_a_server_gets_as_many_leases_as_it_asked_for(new_story: Any, credits: int) -> None:
    story = new_story(max_staleness=3)
    granted = story.do(lambda d: leases.grant_some(d, "a", 1, credits))
    assert [group.id for group in granted] == ["g0", "g1"][:credits]


def test_the_last_chunk_of_a_step_is_as_large_as_what_is_left(new_story: Any) -> None:
    story = new_story(max_staleness=1, prompts_per_step=3, groups_per_chunk=2, groups=8)
    for _ in range(4):
        story.make()
    assert [chunk.groups for chunk in story.state.plan.chunks] == [("g0", "g1"), ("g2",)]
    assert story.state.plan.close is not None
    assert story.status("g3") is Status.READY


def test_every_sample_of_a_put_is_one_of_the_group(new_story: Any) -> None:
    story = new_story()
    with pytest.raises(InvalidInput, match="sample 2 of group g0: a group has 2 samples"):
        story.put(story.lease(), samples=(0, 2), outcome=None)


def test_groups_that_hold_a_step_up_are_those_that_the_next_steps_cannot_take(new_story: Any) -> None:
    """From step 1 on each step has one place, so the second of two running groups would be trained in step 2."""
    story = new_story(max_staleness=1, groups=4)
    first, second = story.lease("a"), story.lease("b")
    assert (first.deadline, second.deadline) == (1, 1)
    assert late_groups(story.state) == [second]
    second.deadline = 2
    assert late_groups(story.state) == []
    wide = new_story(max_staleness=1, prompts_per_step=2, groups_per_chunk=2, groups=4)
    three = [wide.lease("a") for _ in range(3)]
    assert late_groups(wide.state) == three[2:]


def test_a_run_is_over_at_its_last_step_or_once_it_is_sealed_and_empty(new_story: Any) -> None:
    story = new_story(total_steps=3, groups=1)
    assert [run_over(story.state, step) for step in (0, 2, 3, 4)] == [False, False, True, True]
    endless = new_story(groups=1)
    assert not run_over(endless.state, 10**6)
    endless.do(lifecycle.seal)
    assert not run_over(endless.state, 0), "a group is still to be trained"
    assert endless.put(endless.lease(), outcome="failed") == "dropped"
    assert run_over(endless.state, 0)
    assert run_over(endless.state, 1)
    story.do(lifecycle.end)
    assert run_over(story.state, 0)


def test_I2_a_token_off_the_line_is_never_masked_away(new_story: Any) -> None:
    story = new_story(stale_policy="mask")
    assert story.put(story.lease(), tokens={V0: 3, PolicyVersion(7, 0): 1}) == "sent_back"


@pytest.mark.parametrize("outcome", ["ok", "failed", None])
def test_I8_a_repeated_put_gets_the_stored_answer(new_story: Any, outcome: Any) -> None:
    story = new_story()
    group = story.lease()
    first = replace(group)  # a put that is repeated names the lease as it was
    answer = story.put(group, outcome=outcome)
    held = story.state.bytes_held
    story.do(lambda d: fence(d, "a", 2))
    assert story.put(first, outcome=outcome) == answer
    assert story.state.bytes_held == held


def test_I7_the_digest_of_a_plan_covers_which_rows_a_rank_trains(new_story: Any) -> None:
    story = new_story()
    story.make()
    plan = story.state.plan
    (chunk,) = plan.chunks
    (batch,) = chunk.ranks[0]
    other = replace(batch, rows=keys_of([("g0", 1, 0), ("g0", 2, 0)]))  # as many spans, of other samples
    before = plan_digest(story.state, plan)
    assert before == plan.close.plan_digest
    plan.chunks[0] = replace(chunk, ranks=((other,),))
    assert plan_digest(story.state, plan) != before
    plan.chunks[0] = chunk
    assert plan_digest(story.state, plan) == before
    story.state.group("g0").parts[0].digest = "the same rows with other values"
    assert plan_digest(story.state, plan) != before


def test_all_chunks_that_are_ready_are_planned_at_once(new_story: Any) -> None:
    story = new_story(max_staleness=1, prompts_per_step=2, groups_per_chunk=1, groups=8)
    for _ in range(4):
        story.make()
    assert story.state.plan.groups() == ["g0", "g1"]
    story.commit(1, ("g0", "g1"), story.digest())
    assert [chunk.groups for chunk in story.state.plan.chunks] == [("g2",), ("g3",)]
    assert story.state.plan.close is not None


def test_I2_a_ready_group_that_masking_leaves_no_token_is_dropped(new_story: Any) -> None:
    story = new_story(stale_policy="mask", max_staleness=0)
    group = story.make()
    story.commit(1, ())
    assert story.status(group.id) is Status.DROPPED
    assert story.state.dropped_by_reason == {"too_stale": 1}


def test_I2_masking_moves_a_deadline_to_the_first_step_that_has_a_place(new_story: Any) -> None:
    story = new_story(stale_policy="mask", max_staleness=1, prompts_per_step=2, groups_per_chunk=2)
    groups = [story.lease("a") for _ in range(4)]
    assert [group.deadline for group in groups] == [1] * 4
    story.commit(1, ())
    assert sorted(group.deadline for group in groups) == [1, 1, 2, 2]


def test_a_lease_without_a_pending_group_is_refused_by_that_name(new_story: Any) -> None:
    assert new_story(groups=0).lease().reason == "no_group"
    ended = new_story()
    ended.do(lifecycle.end)
    assert ended.lease().reason == "no_group"


@pytest.mark.parametrize(("outcome", "kept"), [("ok", True), ("failed", False), (None, True)])
def test_payload_is_kept_only_where_the_put_left_rows(new_story: Any, outcome: Any, kept: bool) -> None:
    story = new_story()
    story.put(story.lease(), outcome=outcome)
    assert (story.block is not None) == kept
    assert set(story.state.blocks) == ({story.block} if kept else set())


def test_a_server_gets_what_can_be_granted_or_the_reason_why_nothing_can(new_story: Any) -> None:
    story = new_story(max_staleness=1)
    granted = story.do(lambda d: leases.grant_some(d, "a", 1, 9))
    assert [group.id for group in granted] == ["g0", "g1"]
    refused = story.do(lambda d: leases.grant_some(d, "a", 1, 9))
    assert isinstance(refused, leases.Refused)
    assert refused.reason == "staleness"


def test_nothing_is_planned_after_the_last_step_or_the_end(new_story: Any) -> None:
    story = new_story(total_steps=1, max_staleness=2)
    for _ in range(2):
        story.make()
    assert story.state.plan.groups() == ["g0"]
    story.commit(1, ("g0",), story.digest())
    assert (story.state.plan, story.status("g1")) == (None, Status.READY)


SEALED: dict[Status, Any] = {
    Status.PENDING: lambda story: None,
    Status.LEASED: lambda story: story.lease(),
    Status.READY: lambda story: story.make(),
    Status.PLANNED: lambda story: story.make(),
    Status.ROLLED_BACK: lambda story: (
        story.make(),
        story.commit(1, ("g0",), story.digest()),
        story.record(following.rollback, 1, 0),
    ),
}


@pytest.mark.parametrize("status", SEALED)
def test_a_sealed_run_is_not_over_while_a_group_can_be_trained(new_story: Any, status: Status) -> None:
    places = 2 if status is Status.READY else 1
    story = new_story(groups=1, prompts_per_step=places, groups_per_chunk=places, snapshot_every=2)
    SEALED[status](story)
    assert story.status("g0") is status
    story.state.phase = Phase.DRAINING
    assert not run_over(story.state, 0)


def test_a_closing_deadline_is_noted_once_and_only_for_the_step_that_is_open(new_story: Any) -> None:
    story = new_story(prompts_per_step=2, groups_per_chunk=2, closing="min_n", closing_min_prompts=2)

    def note(step: int) -> int:
        before = len(story.log)
        story.do(lambda d: closing_due(d, step))
        return len(story.log) - before

    assert (note(1), note(0), note(0)) == (0, 1, 0)
    closed = new_story(prompts_per_step=1)
    closed.make()
    assert closed.state.plan.close is not None
    closed.do(lambda d: closing_due(d, 0))
    assert closed.state.closing_due == -1


def test_a_chunk_holds_its_groups_in_the_order_of_their_offer(new_story: Any) -> None:
    story = new_story(max_staleness=1, prompts_per_step=2, groups_per_chunk=2)
    first, second = story.lease("a"), story.lease("b")
    first.deadline, second.deadline = 1, 0
    assert story.put(first) == "accepted"
    assert story.put(second) == "accepted"
    (chunk,) = story.state.plan.chunks
    assert (chunk.groups, chunk.oldest_trained) == (("g0", "g1"), ())


def test_denominators_count_tokens_by_segment_and_samples_once(new_story: Any) -> None:
    story = new_story(samples_per_prompt=3)
    group = story.lease()
    story.put(group, samples=(0,), segments=3, outcome=None)
    story.put(group, samples=(1,), segments=2, tokens={V0: 0}, outcome=None)
    story.put(group, samples=(2,), segments=1)
    close = story.state.plan.close
    assert (close.n_tokens, close.n_samples) == (4 * 2, 2), "sample 1 has no token to train"


def test_denominators_leave_out_samples_without_tokens_also_where_no_sample_has_segments(new_story: Any) -> None:
    story = new_story(samples_per_prompt=3)
    group = story.lease()
    story.put(group, samples=(0, 1), outcome=None)
    story.put(group, samples=(2,), tokens={V0: 0})
    close = story.state.plan.close
    assert (close.n_tokens, close.n_samples) == (4, 2)


@pytest.mark.parametrize("dropped", ["failed", "no_signal", "too_few_valid_samples", "quarantined", "too_stale"])
def test_a_dropped_group_is_counted_in_the_step_that_was_the_head(new_story: Any, dropped: str) -> None:
    story = new_story(lease_attempts_max=1, stale_policy="mask" if dropped == "too_stale" else "wait", max_staleness=1)
    for step in (0, 1):
        if step:
            story.make()
            story.commit(1, (story.state.plan.groups()[0],), story.digest())
        group = story.lease("b")
        if dropped == "quarantined":
            story.do(lambda d, g=group: leases.expire(d, g.id, g.attempts))
        elif dropped == "too_stale":
            group.oldest_trained = 1
            assert story.put(group, tokens={V0: 3}) == "dropped"
        elif dropped == "too_few_valid_samples":
            assert story.put(group, valid=False) == "dropped"
        else:
            assert story.put(group, outcome=dropped) == "dropped"
        assert (story.state.group(group.id).step, story.state.group(group.id).reason) == (step, dropped)
        story.confirm("a", V0)
    assert story.state.drops_by_step == {0: 1, 1: 1}


def test_a_group_that_failed_without_a_reason_is_dropped_as_failed(new_story: Any) -> None:
    story = new_story()
    story.put(story.lease(), outcome="failed")
    assert story.state.dropped_by_reason == {"failed": 1}


def test_what_a_group_waits_for_to_be_complete_is_named(new_story: Any) -> None:
    story = new_story(samples_per_prompt=3)
    group = story.lease()
    story.put(group, samples=(1,), outcome=None)
    with pytest.raises(InvalidInput, match=r"samples \[2\] were never put"):
        story.put(group, samples=(0,))
    with pytest.raises(AlreadyExists, match=r"samples \[1\] of group g0 were put before"):
        story.put(group, samples=(0, 1, 2))
    assert story.put(group, samples=(0, 2)) == "accepted"


def test_a_chunk_is_planned_as_soon_as_its_groups_are_ready(new_story: Any) -> None:
    """The actor computes on it while the other groups of the step are still generated."""
    story = new_story(max_staleness=1, prompts_per_step=5, groups_per_chunk=2, groups=6)
    chunks = []
    for _ in range(5):
        story.make()
        chunks.append([chunk.groups for chunk in story.state.plan.chunks] if story.state.plan else [])
    first, second = ("g0", "g1"), ("g2", "g3")
    assert chunks == [[], [first], [first], [first, second], [first, second, ("g4",)]]


def test_a_step_that_closes_short_leaves_all_places_of_the_next_one(new_story: Any) -> None:
    story = new_story(
        max_staleness=1, prompts_per_step=2, groups_per_chunk=2, closing="min_n", closing_min_prompts=1,
        closing_deadline_seconds=1.0,
    )  # fmt: skip
    first, *others = [story.lease("a") for _ in range(3)]
    story.put(first)
    story.do(lambda d: closing_due(d, 0))
    assert story.state.plan.groups() == ["g0"]
    assert [(group.status, group.deadline) for group in others] == [(Status.LEASED, 1)] * 2


def test_only_a_lease_that_ends_against_the_server_s_will_is_a_lost_one(new_story: Any) -> None:
    story = new_story(max_staleness=1)
    story.put(story.lease(), outcome=None, samples=(), returns=True)
    assert story.put(story.lease(), tokens={PolicyVersion(7, 0): 1}) == "sent_back"
    assert story.state.n_leases_lost == 0
    group = story.lease()
    story.do(lambda d: leases.expire(d, group.id, group.attempts))
    assert story.state.n_leases_lost == 1


def test_a_group_of_one_sample_may_fail_without_one(new_story: Any) -> None:
    story = new_story(samples_per_prompt=1, min_valid_samples=1)
    assert story.put(story.lease(), outcome="failed", samples=()) == "dropped"


def test_a_group_is_complete_only_with_all_fields_that_come_with_a_put(new_story: Any) -> None:
    story = new_story()
    fields = tuple(Field(name, "float32", (), "sample", "rollout") for name in ("reward", "temperature"))
    story.state.spec = replace(story.state.spec, fields=(*fields, Field("ref", "float32", (), "sample", "reference")))
    group = story.lease()
    assert story.put(group, samples=(0,), fields=("reward",), outcome=None) == "accepted"
    with pytest.raises(InvalidInput, match=r"fields \['temperature'\] were never put"):
        story.put(group, samples=(1,), fields=("reward",))
    assert story.put(group, samples=(1,), fields=("reward", "temperature")) == "accepted"


@pytest.mark.parametrize(
    ("more", "disposition"), [({}, "accepted"), ({PolicyVersion(7, 0): 1}, "sent_back"), ({V2: 1}, "sent_back")]
)
def test_I2_mask_takes_a_put_without_its_tokens_that_are_too_old_unless_one_is_off_the_line(
    new_story: Any, more: dict[PolicyVersion, int], disposition: str
) -> None:
    story = new_story(max_staleness=1, groups=6, stale_policy="mask")
    story.make()
    story.commit(1, ("g0",), story.digest())
    story.confirm("a", V1)
    group = story.lease()
    assert story.put(group, tokens={V1: 3, V0: 1, **more}) == disposition
    if disposition == "accepted":
        assert (group.oldest_trained, group.loss_tokens()) == (1, [3, 3])


def test_I2_a_straggler_is_masked_for_the_step_in_which_it_has_a_place(new_story: Any) -> None:
    """Step 1 takes the two that are ready, step 2 two of the three others: the last one has a place in step 3."""
    story = new_story(max_staleness=2, prompts_per_step=2, groups_per_chunk=2, stale_policy="mask", groups=9)
    story.commit(1, ())
    story.confirm("b", V1)
    stragglers = [story.lease("a") for _ in range(3)]
    ready = [story.lease("b") for _ in range(2)]
    assert [group.deadline for group in (*stragglers, *ready)] == [2, 2, 2, 3, 3]
    for group in ready:
        assert story.put(group, V1) == "accepted"
    assert story.state.plan.groups() == [group.id for group in ready]
    assert [(group.deadline, group.oldest_trained) for group in stragglers] == [(2, 0), (2, 0), (3, 1)]
