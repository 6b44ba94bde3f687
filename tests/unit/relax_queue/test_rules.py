"""One short story for each rule of the step commit that the broker keeps: without the rule, the story ends badly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from relax_common.errors import AlreadyExists, InvalidInput, Precondition, StaleTerm
from relax_common.versions import PolicyVersion
from relax_queue.rules import events as ev
from relax_queue.rules import following, leases, lifecycle, reading
from relax_queue.rules.group import Group, Status
from relax_queue.rules.leases import Refused
from relax_queue.rules.transaction import fence

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)


def test_I3_no_lease_is_granted_that_would_be_trained_too_late(new_story: Any) -> None:
    story = new_story(max_staleness=1, prompts_per_step=1)
    story.make()  # planned at once: step 0
    assert isinstance(story.lease(), Group)  # step 1 = version 0 + 1
    refused = story.lease()
    assert isinstance(refused, Refused)
    assert refused.reason == "staleness"
    assert "the actor must commit step 0 first" in refused.message
    story.commit(1, ("g0",), story.digest())
    assert isinstance(story.lease(), Refused), "its server has confirmed only version 0"
    story.confirm("a", V1)
    assert isinstance(story.lease(), Group)


def test_I2_tokens_of_a_dead_lineage_send_a_group_to_the_front_without_them(new_story: Any) -> None:
    story = new_story(max_staleness=0, snapshot_every=2)
    story.make()
    story.commit(1, ("g0",), story.digest())
    story.record(following.rollback, 1, 0)
    group = story.lease()  # a has swapped to version 0.1 before and confirmed only version 0.0
    assert story.put(group, V1) == "sent_back"
    assert story.status(group.id) is Status.PENDING
    assert not story.state.group(group.id).rows


def test_I3_the_deadline_of_a_group_follows_its_oldest_kept_token(new_story: Any) -> None:
    story = new_story(max_staleness=2)
    group = story.lease("a")
    story.put(group, outcome=None, samples=(0,), returns=True)
    story.commit(1, ())
    story.confirm("b", V1)
    again = story.lease("b")
    assert (again.id, again.deadline) == ("g0", 2), "min(kept token of version 0, confirmed version 1) + max_staleness"
    story.put(again, V1, outcome=None, samples=(), returns=True)
    other = new_story(max_staleness=2)
    other.commit(1, ())
    other.confirm("b", V1)
    other.put(other.lease("b"), V1, outcome=None, samples=(0,), returns=True)
    again = other.lease("a")
    assert (again.id, again.deadline) == ("g0", 2), "min(kept token of version 1, confirmed version 0) + max_staleness"


def test_I3_kept_tokens_that_no_longer_fit_are_discarded_and_never_refuse_the_lease(new_story: Any) -> None:
    story = new_story(max_staleness=1)
    first, second = story.lease("a"), story.lease("b")
    story.put(first)
    story.put(second, outcome=None, samples=(0,), returns=True)
    story.commit(1, ("g0",), story.digest())
    story.confirm("b", V1)
    assert story.lease("b").id == "g1"
    story.put(story.state.group("g1"), V1, outcome=None, samples=(), returns=True)
    story.commit(2, ())
    story.confirm("b", PolicyVersion(0, 2))
    again = story.lease("b")
    assert (again.id, again.deadline, len(again.rows)) == ("g1", 3, 0)


def test_I6_a_confirmation_belongs_to_a_term(new_story: Any) -> None:
    story = new_story()
    story.do(lambda d: fence(d, "a", 2))
    refused = story.lease("a", term=2)
    assert isinstance(refused, Refused)
    assert refused.reason == "unconfirmed"
    story.confirm("a", V0, term=2)
    assert isinstance(story.lease("a", term=2), Group)


def test_I8_an_old_term_is_refused_everywhere(new_story: Any) -> None:
    story = new_story()
    group = story.lease("a")
    story.do(lambda d: fence(d, "a", 2))
    assert story.status("g0") is Status.PENDING, "the newer incarnation does not know of this lease"
    with pytest.raises(StaleTerm):
        story.put(group)
    with pytest.raises(StaleTerm):
        story.lease("a", term=1)
    story.do(lambda d: fence(d, "actor", 3))
    with pytest.raises(StaleTerm):
        story.do(lambda d: fence(d, "actor", 2))
    story.crash()
    with pytest.raises(StaleTerm):
        story.do(lambda d: fence(d, "actor", 2))


def test_I1_a_commit_wins_over_a_drop_after_a_lost_plan(new_story: Any) -> None:
    story = new_story(max_staleness=0)
    story.make()
    digest = story.digest()
    story.crash()
    group = story.lease()
    assert story.put(group, outcome="no_signal") == "dropped"
    assert story.state.dropped_by_reason == {"no_signal": 1}
    story.commit(1, ("g0",), digest)
    assert story.status("g0") is Status.TRAINED
    assert story.state.dropped_by_reason == {}, "uncounted"


def test_I7_a_commit_of_a_lost_plan_is_not_replayed_from_rows_of_another(new_story: Any) -> None:
    story = new_story(max_staleness=0)
    story.make()
    lost = story.digest()
    story.crash()
    story.make()
    assert story.digest() != lost, "the same group with other tokens is another plan"
    story.commit(1, ("g0",), lost)
    with pytest.raises(Precondition) as gone:
        story.plan_of(0)
    assert gone.value.reason == "ROWS_FREED"
    assert story.state.n_reserved == 0


def test_I1_groups_that_another_plan_left_behind_are_ready_again_or_generated_again_if_late(new_story: Any) -> None:
    story = new_story(max_staleness=1, groups=4)
    story.make()
    lost = story.digest()
    story.crash()
    story.put(story.lease("a"), outcome=None, samples=(), returns=True)
    first, second = story.lease("a"), story.lease("b")
    story.put(second)
    assert story.status(second.id) is Status.PLANNED
    story.commit(1, (first.id,), lost)
    assert story.status(first.id) is Status.TRAINED
    assert story.plan_of(1) is not None
    assert story.plan_of(1).groups() == [second.id]  # type: ignore[union-attr]
    with pytest.raises(Precondition):
        story.put(first)


def test_I1_open_groups_that_no_longer_fit_after_a_commit_are_generated_again(new_story: Any) -> None:
    story = new_story(max_staleness=0)
    story.make()
    lost = story.digest()
    story.crash()
    story.do(lambda d: leases.grant(d, "a", 1))
    story.put(story.state.group("g0"), outcome="failed")
    late = story.lease("b")
    story.commit(1, ("g0",), lost)
    assert story.status(late.id) is Status.PENDING
    assert story.state.n_leases_lost == 1


def test_a_rolled_back_group_is_taken_again_only_after_its_record(new_story: Any) -> None:
    story = new_story(max_staleness=0, snapshot_every=2)
    story.make()
    story.commit(1, ("g0",), story.digest())
    revision = story.record(following.rollback, 1, 0)
    assert story.status("g0") is Status.ROLLED_BACK
    story.do(lifecycle.seal)
    early = story.do(lambda d: lifecycle.offer(d, "relaxd", 1, story.prompts[:1], revision - 1))
    assert early == (0, 1)
    assert story.status("g0") is Status.ROLLED_BACK
    assert story.do(lambda d: lifecycle.offer(d, "relaxd", 1, story.prompts[:1], revision)) == (1, 0)
    assert story.make().id == "g0", "its place in the pending queue is its first one"


def test_a_step_closes_short_when_refills_are_used_up_and_never_empty(new_story: Any) -> None:
    story = new_story(max_staleness=0, prompts_per_step=3, groups_per_chunk=3, max_refills_per_step=1, groups=9)
    for _ in range(3):
        assert story.put(story.lease(), outcome="no_signal") == "dropped"
    assert story.plan_of(0) is None
    story.make()
    close = story.state.plan.close  # type: ignore[union-attr]
    assert close is not None
    assert (close.groups, close.short_reason) == (("g3",), "refills_used_up")
    assert (close.n_tokens, close.n_samples) == (4, 2)


def test_the_last_step_of_a_sealed_run_closes_short_and_then_the_run_is_over(new_story: Any) -> None:
    story = new_story(prompts_per_step=2, groups_per_chunk=2, groups=1)
    story.make()
    assert story.plan_of(0) is None
    story.do(lifecycle.seal)
    assert story.state.plan.close.short_reason == "run_ends"  # type: ignore[union-attr]
    story.commit(1, ("g0",), story.digest())
    answer = reading.find_plan(story.state, 0, 1, 0, 0)
    assert answer is not None
    assert answer.plan is None


def test_I11_a_group_with_too_few_valid_samples_is_dropped_with_the_reason(new_story: Any) -> None:
    story = new_story()
    assert story.put(story.lease(), valid=False) == "dropped"
    assert story.state.dropped_by_reason == {"too_few_valid_samples": 1}
    assert story.put(story.lease(), outcome="failed", samples=(), reason="prompt too long") == "dropped"
    assert story.state.dropped_by_reason["prompt too long"] == 1


def test_I4_rows_are_freed_when_the_frontier_passes_their_step_and_not_before(new_story: Any) -> None:
    story = new_story(max_staleness=0)
    story.make()
    story.commit(1, ("g0",), story.digest())
    assert story.state.blocks
    assert story.state.n_reserved == 1
    assert story.plan_of(0) is not None
    story.record(following.frontier, 1)
    assert not story.state.blocks
    assert story.state.n_reserved == 0


def test_I4_a_group_larger_than_its_reservation_is_refused_and_keeps_what_it_has(new_story: Any) -> None:
    story = new_story()
    group = story.lease()
    reserved = story.state.spec.bytes_per_group
    story.put(group, outcome=None, samples=(0,), n_bytes=reserved - 100)
    with pytest.raises(InvalidInput, match=rf"would hold {reserved + 1} bytes, its lease reserved {reserved}") as large:
        story.put(group, samples=(1,), n_bytes=101)
    assert large.value.reason == "OVERSIZE"
    assert (story.state.bytes_held, story.status("g0")) == (reserved - 100, Status.LEASED)
    assert story.put(group, samples=(1,), n_bytes=100) == "accepted"
    assert story.state.bytes_held <= story.state.n_reserved * reserved


def test_stale_policy_drop_drops_what_would_be_late(new_story: Any) -> None:
    story = new_story(max_staleness=0, stale_policy="drop")
    story.make()
    lost = story.digest()
    story.crash()
    first, late = story.lease("a"), None
    story.put(first, outcome="failed")
    late = story.lease("b")
    story.commit(1, ("g0",), lost)
    assert story.status(late.id) is Status.DROPPED
    assert story.state.dropped_by_reason == {"too_stale": 1}


def test_I4_a_lease_waits_while_steps_after_F_hold_the_budget(new_story: Any) -> None:
    story = new_story(max_staleness=0, groups=6)
    spec = story.state.spec
    story.state.spec = replace(spec, memory_budget_bytes=spec.bytes_needed)
    for step in range(2):  # one of them because snapshot_every = 1
        story.confirm("a", PolicyVersion(0, step))
        group = story.make(PolicyVersion(0, step))
        story.commit(step + 1, (group.id,), story.digest())
    story.confirm("a", PolicyVersion(0, 2))
    refused = story.lease()
    assert isinstance(refused, Refused)
    assert (refused.reason, story.state.n_reserved) == ("bytes", 2)
    assert "hold the byte budget; F is version 0" in refused.message
    story.record(following.frontier, 1)
    assert isinstance(story.lease(), Group)


def test_I8_a_lost_lease_neither_puts_under_the_next_one_nor_ends_it(new_story: Any) -> None:
    story = new_story()
    story.lease("a")
    story.do(lambda d: leases.expire(d, "g0", 1))
    again = story.lease("a")
    assert (again.id, again.attempts) == ("g0", 2)
    story.do(lambda d: leases.expire(d, "g0", 1))
    assert story.status("g0") is Status.LEASED, "a late timer of the first lease"
    with pytest.raises(Precondition):
        leases.leased(story.state, "a", 0, "g0", 1)
    assert story.put(again) == "accepted"


def test_a_group_that_is_offered_again_after_a_rollback_has_lost_no_lease(new_story: Any) -> None:
    story = new_story(max_staleness=0, snapshot_every=2, lease_attempts_max=2)
    story.lease("a")
    story.do(lambda d: leases.expire(d, "g0", 1))
    story.make()
    story.commit(1, ("g0",), story.digest())
    revision = story.record(following.rollback, 1, 0)
    assert story.do(lambda d: lifecycle.offer(d, "relaxd", 1, story.prompts[:1], revision)) == (1, 0)
    assert story.state.group("g0").leases_lost == 0


def test_a_run_grows_to_a_later_end_and_changes_in_nothing_else(new_story: Any) -> None:
    story = new_story(total_steps=4)
    known = ev.RunOpened("run", "digest", story.state.spec, "dcs")
    longer = replace(known, recipe_digest="other", spec=replace(known.spec, total_steps=6))
    story.do(lambda d: lifecycle.reopen(d, longer))
    assert (story.state.spec.total_steps, story.state.recipe_digest) == (6, "other")
    story.do(lambda d: lifecycle.reopen(d, longer))
    seeded = replace(longer, spec=replace(longer.spec, total_steps=7, seed=longer.spec.seed + 1))
    for refused in (known, seeded):
        with pytest.raises(AlreadyExists):
            story.do(lambda d, refused=refused: lifecycle.reopen(d, refused))
    story.do(lifecycle.end)
    with pytest.raises(AlreadyExists):
        story.do(lambda d: lifecycle.reopen(d, replace(longer, spec=replace(longer.spec, total_steps=9))))
