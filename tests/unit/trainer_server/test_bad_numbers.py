"""What goes wrong with numbers in practice: huge ratios, missing rewards, empty responses, end tokens."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from relax_common.recipe.algorithms import GrpoConfig
from relax_common.rows import RewardStatus
from rollout_server.engines.contract import Completion, FinishReason
from rollout_server.rewards.outcome import RewardOutcome, interpret
from rollout_server.trajectory.samples import Scored, judge_group, make_rows
from trainer_server.algorithms import Tokens, make_algorithm
from trainer_server.maths.advantages import group_advantages
from trainer_server.maths.aggregation import StepCounts, masked_sum
from trainer_server.maths.policy_loss import LOG_RATIO_LIMIT, log_ratio, ppo_clip
from trainer_server.maths.sequences import Sequences


def token_mean(new: Tensor, old: Tensor, mask: Tensor, advantage: float, kl_loss_coef: float = 0.0) -> Tensor:
    algorithm = make_algorithm(GrpoConfig(kl_loss_coef=kl_loss_coef))
    advantages = torch.full_like(new, advantage)
    parts = algorithm.objective(Tokens(new, old, advantages, mask, Sequences.of([len(new)]), reference=old))
    total = masked_sum(parts.tokens.loss, torch.ones_like(new), mask)
    return total / algorithm.divisor(StepCounts(int(mask.sum()), 1))


@pytest.mark.parametrize("hidden", [-95.0, 95.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kl_loss_coef", [0.0, 0.1])
def test_a_masked_token_changes_neither_loss_nor_gradient_whatever_it_holds(hidden: float, kl_loss_coef: float) -> None:
    new = tensor([-0.4, -2.5, -1.1, -0.7], requires_grad=True)
    old = tensor([-0.4, hidden, -1.1, -0.7])
    loss = token_mean(new, old, tensor([True, False, True, True]), 3.0, kl_loss_coef)
    loss.backward()
    assert loss.item() == pytest.approx(-3.0)
    assert new.grad is not None
    assert_close(new.grad, tensor([-1.0, 0.0, -1.0, -1.0]))


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_the_loss_stays_finite_where_the_ratio_would_overflow(advantage: float) -> None:
    new, old, mask = tensor([-3.0], requires_grad=True), tensor([-130.0]), tensor([True])
    loss = token_mean(new, old, mask, advantage)
    loss.backward()
    assert new.grad is not None
    assert torch.isfinite(loss)
    assert torch.isfinite(new.grad).all()
    assert log_ratio(new, old, mask).item() == LOG_RATIO_LIMIT
    if advantage == 0:
        assert (loss.item(), new.grad.tolist()) == (0.0, [0.0])


def test_a_number_that_is_none_on_a_trained_token_is_seen_and_not_hidden() -> None:
    both = torch.ones(2).bool()
    assert math.isnan(
        float(ppo_clip(tensor([-0.5, math.nan]), torch.zeros(2), torch.ones(2), both, 0.2, 0.2).loss.sum())
    )


def advantages(returned: list[object]) -> list[float]:
    """The advantages of one group, from what its reward function returned."""
    outcomes = [interpret(each) for each in returned]
    values = group_advantages(
        "group_mean_std",
        tensor([each.value for each in outcomes], dtype=torch.float32),
        ["g"] * len(outcomes),
        tensor([each.status is RewardStatus.OK for each in outcomes]),
    )
    return [round(float(each), 4) for each in values]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([math.nan, 1, 0, 0], [0, 1.1547, -0.5773, -0.5773]),
        ([math.inf, 1, 0, 0], [0, 1.1547, -0.5773, -0.5773]),
        (["0.5", 1, 0, 0], [0, 1.1547, -0.5773, -0.5773]),
        ([None, None, None, 1], [0, 0, 0, 0]),
        ([1, 1, 1, 1], [0, 0, 0, 0]),
    ],
)
def test_I11_a_reward_that_is_no_number_leaves_the_group_alone(returned: list[object], expected: list[float]) -> None:
    assert advantages(returned) == pytest.approx(expected, abs=2e-4)


def completion(ids: list[int], log_probs: list[float]) -> Completion:
    size = len(ids)
    versions = np.full(size, 1, np.int64)
    return Completion(np.array(ids, np.int32), np.array(log_probs, np.float32), versions, FinishReason.STOP)


def test_an_empty_response_counts_in_the_baseline_and_trains_nothing() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0]
    outcomes = [RewardOutcome(RewardStatus.OK, value) for value in rewards]
    responses: list[list[int]] = [[], [5, 2], [6, 2], [7, 8, 2]]
    rows = make_rows(range(4), [1, 3], [completion(ids, [-0.5] * len(ids)) for ids in responses], 1.0, outcomes)
    assert rows.loss_mask.tolist() == [0, 0, *[0, 0, 1, 1] * 2, 0, 0, 1, 1, 1]
    assert rows.n_sampled == 7
    assert judge_group([Scored(value, RewardStatus.OK) for value in rewards], 2)[0] == "ok"
    assert advantages([*rewards]) == pytest.approx([0.8660, -0.8660, -0.8660, 0.8660], abs=2e-4)


def test_a_microbatch_of_empty_responses_has_loss_and_gradient_zero() -> None:
    new = tensor([-0.4, -0.6], requires_grad=True)
    nothing = torch.zeros(2).bool()
    loss = masked_sum(
        ppo_clip(new, tensor([-0.4, -0.6]), torch.ones(2), nothing, 0.2, 0.2).loss, torch.ones(2), nothing
    )
    loss.backward()
    assert new.grad is not None
    assert (loss.item(), new.grad.tolist()) == (0.0, [0.0, 0.0])


def test_a_sampled_end_token_keeps_its_log_prob_and_one_that_was_not_sampled_is_not_there() -> None:
    """Under an unchanged policy the product of ratios over the trained tokens is 1 either way."""
    end = math.log(0.03)
    ok = RewardOutcome(RewardStatus.OK, 1.0)
    sampled = make_rows([0], [1], [completion([5, 6, 7, 2], [-0.3] * 3 + [end])], 1.0, [ok])
    stopped = make_rows([0], [1], [completion([5, 6, 7], [-0.3] * 3)], 1.0, [ok])
    for rows, policy in ((sampled, [0.0, -0.3, -0.3, -0.3, end]), (stopped, [0.0, -0.3, -0.3, -0.3])):
        mask = torch.from_numpy(rows.loss_mask).bool()
        ratio = log_ratio(tensor(policy), torch.from_numpy(rows.log_probs), mask)
        assert float(ratio.sum().exp()) == pytest.approx(1.0)
        assert int(mask.sum()) == len(policy) - 1
