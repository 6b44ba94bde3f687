"""Stale policies, closing, quarantine and deterministic plans: each decides differently what happens to a group."""

from __future__ import annotations

import random
from typing import Any

import pytest

from relax_common.versions import PolicyVersion
from relax_queue.rules import following, leases, lifecycle
from relax_queue.rules.group import Status
from relax_queue.rules.planning import closing_due
from relax_queue.rules.transaction import fence

V0, V1, V2 = PolicyVersion(0, 0), PolicyVersion(0, 1), PolicyVersion(0, 2)


def straggler(new_story: Any, policy: str) -> Any:
    """Two groups of version 0 that may both be trained in step 0 only; one is ready, one is still generated."""
    story = new_story(max_staleness=0, prompts_per_step=2, groups_per_chunk=2, stale_policy=policy, groups=6)
    first, late = story.lease("a"), story.lease("b")
    story.put(first)
    story.late = late
    return story


def test_I2_wait_keeps_the_step_open_for_a_straggler(new_story: Any) -> None:
    story = straggler(new_story, "wait")
    story.do(lambda d: lifecycle.seal(d))
    assert story.plan_of(0) is None
    story.put(story.late)
    assert story.plan_of(0).groups() == ["g0", "g1"]


def closed_without(new_story: Any, policy: str) -> Any:
    """The same, with a step that may close with one group once its deadline has passed."""
    story = new_story(
        max_staleness=0, prompts_per_step=2, groups_per_chunk=2, stale_policy=policy, groups=6, closing="min_n",
        closing_min_prompts=1, closing_deadline_seconds=1.0,
    )  # fmt: skip
    first, late = story.lease("a"), story.lease("b")
    story.put(first)
    assert story.plan_of(0) is None
    story.do(lambda d: closing_due(d, 0))
    story.late = late
    return story


def test_a_step_closes_with_fewer_groups_at_its_deadline_and_not_before(new_story: Any) -> None:
    story = closed_without(new_story, "drop")
    close = story.state.plan.close
    assert (close.groups, close.short_reason) == (("g0",), "closing_deadline")
    assert (close.n_tokens, close.n_samples) == (4, 2)


def test_a_deadline_that_passes_early_lets_the_step_close_once_there_are_enough(new_story: Any) -> None:
    story = new_story(
        max_staleness=1, prompts_per_step=3, groups_per_chunk=3, groups=6, closing="min_n", closing_min_prompts=2,
        closing_deadline_seconds=1.0,
    )  # fmt: skip
    story.make()
    story.do(lambda d: closing_due(d, 0))
    assert story.plan_of(0) is None
    story.crash(kept_blocks=set(story.state.blocks))
    story.make(server="b")
    assert story.plan_of(0).groups() == ["g0", "g1"], "the deadline has passed before the restart"
    story.commit(1, ("g0", "g1"), story.digest())
    assert story.state.closing_due == 0
    story.make()
    story.make()
    assert story.plan_of(1) is None, "each step has its own deadline"


def test_I3_a_straggler_whose_deadline_has_not_come_stays_open(new_story: Any) -> None:
    story = new_story(
        max_staleness=2, prompts_per_step=2, groups_per_chunk=2, groups=6, closing="min_n", closing_min_prompts=1,
        closing_deadline_seconds=1.0,
    )  # fmt: skip
    first, late = story.lease("a"), story.lease("b")
    story.put(first)
    story.do(lambda d: closing_due(d, 0))
    assert story.plan_of(0).groups() == [first.id]
    assert story.status(late.id) is Status.LEASED
    story.commit(1, (first.id,), story.digest())
    assert story.put(late) == "accepted"


@pytest.mark.parametrize(
    ("policy", "closes", "status"),
    [
        ("wait", False, Status.LEASED),
        ("regenerate", True, Status.PENDING),
        ("drop", True, Status.DROPPED),
        ("mask", True, Status.LEASED),
    ],
)
def test_I2_a_straggler_past_its_deadline_is_treated_by_the_policy(
    new_story: Any, policy: str, closes: bool, status: Status
) -> None:
    story = closed_without(new_story, policy)
    assert (story.plan_of(0) is not None) == closes
    assert story.status(story.late.id) is status
    if policy == "drop":
        assert story.state.dropped_by_reason == {"too_stale": 1}
    if policy == "regenerate":
        story.commit(1, ("g0",), story.digest())
        story.confirm("b", V1)
        again = story.lease("b")
        assert again.id == story.late.id, "to the front"
        assert not again.rows


def test_I2_mask_trains_only_the_tokens_that_are_fresh_enough(new_story: Any) -> None:
    story = closed_without(new_story, "mask")
    late = story.late
    assert (late.deadline, late.oldest_trained) == (1, 1)
    story.commit(1, ("g0",), story.digest())
    assert story.put(late, tokens={V0: 5, V1: 3}) == "accepted"
    story.confirm("a", V1)
    story.make(V1)
    (chunk,) = story.plan_of(1).chunks
    assert dict(zip(chunk.groups, chunk.oldest_trained, strict=True)) == {"g1": 1, "g2": 0}
    assert story.state.plan.close.n_tokens == 2 * 3 + 2 * 2, "denominators count what is left"
    assert late.oldest_version() == 1
    story.crash(kept_blocks=set(story.state.blocks))
    assert story.plan_of(1).chunks == [chunk], "I7"


def test_I2_mask_drops_a_group_of_which_nothing_is_left(new_story: Any) -> None:
    story = closed_without(new_story, "mask")
    story.commit(1, ("g0",), story.digest())
    assert story.put(story.late, tokens={V0: 5}) == "dropped"
    assert story.state.dropped_by_reason == {"too_stale": 1}


def test_I2_mask_moves_the_deadline_of_a_ready_group_that_another_plan_left_behind(new_story: Any) -> None:
    story = new_story(max_staleness=1, stale_policy="mask", groups=4)
    for _ in range(2):
        story.lease("a")
    story.commit(1, ())
    story.put(story.state.group("g0"), tokens={V0: 2, V1: 1})
    story.put(story.state.group("g1"), tokens={V0: 2, V1: 4})
    assert story.plan_of(1).groups() == ["g0"]
    story.commit(2, ("g0",), story.digest())
    assert story.plan_of(2).groups() == ["g1"]
    assert story.state.plan.close.n_tokens == 8
    assert story.plan_of(2).chunks[0].oldest_trained == (1,)


def test_I2_mask_drops_a_ready_group_of_which_nothing_is_left(new_story: Any) -> None:
    story = new_story(max_staleness=1, stale_policy="mask", groups=4)
    for _ in range(2):
        story.lease("a")
    story.commit(1, ())
    story.put(story.state.group("g0"), tokens={V0: 2, V1: 1})
    story.put(story.state.group("g1"), tokens={V0: 2})
    story.commit(2, (story.state.plan.groups()[0],), story.digest())
    assert story.state.dropped_by_reason == {"too_stale": 1}


def test_I8_a_masked_group_that_is_sent_back_begins_without_a_mask(new_story: Any) -> None:
    story = closed_without(new_story, "mask")
    story.do(lambda d: leases.expire(d, story.late.id, story.late.attempts))
    story.commit(1, ("g0",), story.digest())
    story.confirm("b", V1)
    again = story.lease("b")
    assert (again.id, again.oldest_trained, again.deadline) == (story.late.id, 0, 1)


def test_I3_a_mask_does_not_hide_kept_tokens_from_the_next_lease(new_story: Any) -> None:
    story = closed_without(new_story, "mask")
    story.put(story.late, outcome=None, samples=(0,), tokens={V0: 5})
    story.do(lambda d: leases.expire(d, story.late.id, story.late.attempts))
    assert set(story.late.samples) == {0}
    story.commit(1, ("g0",), story.digest())
    story.confirm("b", V1)
    again = story.lease("b")
    assert (again.id, len(again.samples)) == (story.late.id, 0), "kept tokens that no longer fit are discarded"


def test_I1_a_group_that_loses_lease_after_lease_is_quarantined_with_the_reason(new_story: Any) -> None:
    story = new_story(lease_attempts_max=3)
    for term in range(1, 4):
        story.do(lambda d, t=term: fence(d, "a", t))
        assert story.status("g0") is Status.PENDING
        story.confirm("a", V0, term=term)
        group = story.lease("a", term=term)
        assert group.id == "g0"
        if term != 2:  # that lease ends because its server is replaced
            story.do(lambda d, g=group: leases.expire(d, g.id, g.attempts))
        story.crash()
    assert story.status("g0") is Status.DROPPED
    assert story.state.dropped_by_reason == {"quarantined": 1}
    assert story.state.group("g0").detail == "3 leases were lost, the last at server a: lease_expired"
    assert story.state.n_leases_lost == 3
    assert story.lease("b").id == "g1", "the next one is admitted in its place"


def test_a_voluntary_return_is_no_attempt_and_complete_samples_are_carried_to_the_next_lease(new_story: Any) -> None:
    story = new_story(lease_attempts_max=1)
    for _ in range(4):
        group = story.lease("a")
        story.put(group, outcome=None, samples=(0,), returns=True)
        assert story.status("g0") is Status.PENDING
    assert set(story.state.group("g0").samples) == {0}
    group = story.lease("b")
    assert set(group.samples) == {0}
    assert story.put(group, samples=(1,)) == "accepted", "only what was missing is put"
    assert {sample for sample, _ in group.rows.keys.segments()} == {0, 1}


def plan_in_order(new_story: Any, order: list[int], **changes: Any) -> Any:
    """Chunks of step 0 when its six groups become ready in this order."""
    story = new_story(
        prompts_per_step=6, groups_per_chunk=2, max_staleness=0, groups=6, data_parallel_size=2,
        packer="length_balanced", deterministic=True, **changes,
    )  # fmt: skip
    leases = [story.lease("a") for _ in range(6)]
    for at, i in enumerate(order):
        assert story.plan_of(0) is None, f"chunks are cut only when the step closes, not after {at} groups"
        story.put(leases[i], tokens={V0: 1 + i})
    assert [c.chunk for c in story.state.plan.chunks] == [0, 1, 2]
    return [(c.groups, c.ranks) for c in story.state.plan.chunks]


def test_I7_a_deterministic_plan_does_not_depend_on_the_order_of_arrival(new_story: Any) -> None:
    orders = [random.Random(i).sample(range(6), 6) for i in range(4)]
    plans = [plan_in_order(new_story, order, seed=3) for order in orders]
    assert all(p == plans[0] for p in plans)
    assert plan_in_order(new_story, orders[0], seed=4) != plans[0], "a function of the seed"
    assert [g for groups, _ in plans[0] for g in groups] != sorted(f"g{i}" for i in range(6))


@pytest.mark.parametrize("packer", ["sequential", "length_balanced", "token_budget", "whole_groups"])
def test_each_packer_changes_the_plan(new_story: Any, packer: str) -> None:
    story = new_story(
        prompts_per_step=3, groups_per_chunk=3, max_staleness=0, data_parallel_size=2, packer=packer, groups=3,
        tokens_per_microbatch=12,
    )  # fmt: skip
    for _ in range(3):
        story.make()
    ranks = story.state.plan.chunks[0].ranks
    shape = [[len(b.rows) for b in rank] for rank in ranks]
    assert shape == {
        "sequential": [[3], [3]],
        "length_balanced": [[3], [3]],
        "token_budget": [[3], [3]],
        "whole_groups": [[2, 2], [2]],
    }[packer]  # fmt: skip
    first = [row for b in ranks[0] for row in b.rows]
    if packer == "sequential":
        assert first == [("g0", 0, 0), ("g0", 1, 0), ("g1", 0, 0)]
    if packer == "token_budget":
        assert first == [("g0", 0, 0), ("g1", 0, 0), ("g2", 0, 0)]


def test_I1_settled_groups_stay_known_and_a_rollback_past_F_brings_them_back(new_story: Any) -> None:
    story = new_story(max_staleness=0, lease_attempts_max=1)
    story.make()
    story.commit(1, ("g0",), story.digest())
    story.record(following.frontier, 1)
    assert "g0" not in story.state.groups
    assert story.status("g0") is Status.TRAINED
    assert story.do(lambda d: lifecycle.offer(d, "relaxd", 1, story.prompts[:1], 0)) == (0, 1), "known before"
    story.crash()
    assert story.state.count(Status.TRAINED) == 1
    revision = story.record(following.rollback, 1, 0)
    assert story.status("g0") is Status.ROLLED_BACK
    assert story.do(lambda d: lifecycle.offer(d, "relaxd", 1, story.prompts[:1], revision)) == (1, 0)
    story.confirm("a", V0)
    again = story.lease("a")
    assert (again.id, again.attempts) == ("g0", 2), "its place in the pending queue and its attempts go on"
    story.do(lifecycle.end)
    assert story.state.count(Status.RETURNED) == 4
    assert not story.state.groups, "an ended run holds no group"
