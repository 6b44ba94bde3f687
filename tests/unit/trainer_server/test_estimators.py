"""Advantages against an independent float64 implementation on ragged groups, and the vectors of their definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from relax_common.recipe.algorithms import KINDS, name_of
from trainer_server.algorithms import Samples, make_algorithm
from trainer_server.maths.returns import (
    discounted_returns,
    generalized_advantages,
    last_token_rewards,
    whitened,
)

OF_NAME = {name_of(kind): kind for kind in KINDS}
REQUIRED: dict[str, dict[str, Any]] = {"dr_grpo": {"aggregation_constant": 1.0}, "cispo": {"eps_high": 0.2}}
VALUES = tensor([[0.5, 0.4, 0.2, 9.0], [0.3, 0.1, 0.6, 0.7]])
REWARDS = tensor([[0, 0, 1, 0], [0, 0.1, 0, 1]])
MASK = tensor([[1, 1, 1, 0], [1, 0, 1, 1]]).bool()


def advantages(name: str, samples: Samples, **keys: object) -> Tensor:
    config = OF_NAME[name].model_validate({"name": name, **REQUIRED.get(name, {}), **keys})
    return make_algorithm(config, (1.0, 2.0) if name == "gdpo" else ()).advantages(samples)


def draw(random: np.random.Generator) -> Samples:
    """Groups of one to five samples in any order; some invalid, some not finite, some without a trained token."""
    groups = [f"g{group}" for group in range(int(random.integers(1, 5))) for _ in range(int(random.integers(1, 6)))]
    order = random.permutation(len(groups))
    count = len(groups)
    rewards = random.choice([0.0, 1.0, 0.5, random.normal()], count)
    rewards = np.where(random.random(count) < 0.05, math.nan, rewards)
    width = int(random.integers(1, 9))
    log_probs = -random.random((2, count, width)) * 3
    mask = random.random((count, width)) < random.choice([0.3, 0.8, 1.0], (count, 1))
    parts = random.choice([0.0, 1.0, 0.25], (count, 2))
    return Samples(
        groups=[groups[i] for i in order],
        rewards=torch.tensor(rewards, dtype=torch.float32),
        valid=torch.from_numpy((random.random(count) > 0.1) & np.isfinite(rewards)),
        reward_parts=torch.tensor(parts, dtype=torch.float32),
        mask=torch.from_numpy(mask),
        anchor=torch.tensor(log_probs[0], dtype=torch.float32),
        reference=torch.tensor(log_probs[1], dtype=torch.float32),
    )


def relative(kind: str, rewards: list[float]) -> list[float]:
    """One group, in float64."""
    n, mean = len(rewards), sum(rewards) / len(rewards)
    if n == 1 or len(set(rewards)) == 1:
        return [0.0] * n
    centred = [r - mean for r in rewards]
    if kind == "group_mean_std":
        return [c / (math.sqrt(sum(x * x for x in centred) / (n - 1)) + 1e-6) for c in centred]
    if kind == "leave_one_out":
        return [r - (sum(rewards) - r) / (n - 1) for r in rewards]
    if kind == "maxrl":
        return [c / mean if mean > 0 else 0.0 for c in centred]
    return centred


def by_group(kind: str, samples: Samples, rewards: list[float]) -> list[float]:
    found = [0.0] * len(rewards)
    for group in set(samples.groups):
        members = [
            i
            for i, other in enumerate(samples.groups)
            if other == group and samples.valid[i] and math.isfinite(rewards[i])
        ]
        for i, value in zip(members, relative(kind, [rewards[i] for i in members]) if members else [], strict=True):
            found[i] = value
    return found


def white(values: list[float]) -> list[float]:
    if len(values) < 2:
        return values
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


def trained(samples: Samples) -> list[tuple[int, int]]:
    assert samples.mask is not None
    return [(i, t) for i, t in samples.mask.nonzero().tolist() if samples.valid[i]]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("grpo", "group_mean_std"), ("dr_grpo", "group_mean"), ("rloo", "leave_one_out"), ("maxrl", "maxrl")],
)
@pytest.mark.parametrize("kl_reward_coef", [0.0, 0.2])
def test_group_estimators(name: str, kind: str, kl_reward_coef: float) -> None:
    random = np.random.default_rng(1)
    for _ in range(200):
        samples = draw(random)
        assert samples.mask is not None
        assert samples.anchor is not None
        assert samples.reference is not None
        k1 = torch.where(samples.mask, samples.anchor.double() - samples.reference.double(), 0.0).sum(1)
        # The equality that makes a group say nothing is that of fp32 rewards.
        rewards = (samples.rewards - kl_reward_coef * k1.float()).double().tolist()
        found = advantages(name, samples, kl_reward_coef=kl_reward_coef, kl="k1")
        assert_close(found.double(), tensor(by_group(kind, samples, rewards)).double(), atol=2e-5, rtol=2e-5)


def test_reinforce_pp() -> None:
    random = np.random.default_rng(2)
    for _ in range(200):
        samples = draw(random)
        assert samples.mask is not None
        assert samples.anchor is not None
        assert samples.reference is not None
        gamma, coef = float(random.choice([1.0, 0.9])), float(random.choice([0.0, 0.3]))
        places = trained(samples)
        returns = {}
        for i in range(len(samples.groups)):
            own = [t for sample, t in places if sample == i]
            following = 0.0
            for t in reversed(own):
                reward = float(samples.rewards[i]) if t == own[-1] else 0.0
                reward -= coef * float(samples.anchor[i, t].double() - samples.reference[i, t].double())
                following = reward + gamma * following
                returns[i, t] = following
        expected = torch.zeros(samples.mask.shape, dtype=torch.float64)
        for place, value in zip(places, white([returns[place] for place in places]), strict=True):
            expected[place] = value
        found = advantages("reinforce_pp", samples, gamma=gamma, kl_reward_coef=coef)
        assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_reinforce_pp_baseline_is_whitened_over_tokens() -> None:
    random = np.random.default_rng(3)
    for _ in range(200):
        samples = draw(random)
        assert samples.mask is not None
        relatives = by_group("group_mean", samples, samples.rewards.double().tolist())
        places = trained(samples)
        expected = torch.zeros(samples.mask.shape, dtype=torch.float64)
        for place, value in zip(places, white([relatives[i] for i, _ in places]), strict=True):
            expected[place] = value
        found = advantages("reinforce_pp_baseline", samples)
        # A batch without any difference: rounding of nothing may be large beside 1e-8.
        assert_close(found.double(), expected, atol=1e-3 if expected.abs().max() < 1e-3 else 1e-5, rtol=1e-5)


def test_gdpo_normalises_each_part_and_whitens_over_samples() -> None:
    random = np.random.default_rng(4)
    for _ in range(200):
        samples = draw(random)
        assert samples.reward_parts is not None
        parts = samples.reward_parts.double()
        sums = [
            a + 2 * b
            for a, b in zip(
                by_group("group_mean_std", samples, parts[:, 0].tolist()),
                by_group("group_mean_std", samples, parts[:, 1].tolist()),
                strict=True,
            )
        ]
        valid = [i for i, ok in enumerate(samples.valid.tolist()) if ok]
        expected = torch.zeros(len(sums), dtype=torch.float64)
        for i, value in zip(valid, white([sums[i] for i in valid]), strict=True):
            expected[i] = value
        assert_close(advantages("gdpo", samples).double(), expected, atol=1e-4, rtol=1e-4)


def test_gdpo_counts_a_long_sample_once() -> None:
    sums = tensor([0.7071, -0.7071, 1.4142, -1.4142])
    expected = tensor([0.547723, -0.547723, 1.095445, -1.095445])
    assert_close(whitened(sums, torch.ones(4).bool()), expected, atol=1e-4, rtol=0)


def test_a_part_that_abstains_is_left_out_of_its_group() -> None:
    parts = tensor([[1.0, math.nan], [0.0, 1.0], [0.0, 0.0]])
    samples = Samples(["g"] * 3, torch.zeros(3), torch.ones(3).bool(), reward_parts=parts)
    found = advantages("gdpo", samples)
    assert torch.isfinite(found).all()
    first = relative("group_mean_std", [1.0, 0.0, 0.0])
    second = [0.0, *relative("group_mean_std", [1.0, 0.0])]
    assert_close(found.double(), tensor(white([a + 2 * b for a, b in zip(first, second, strict=True)])).double())


def test_whitening_on_vectors() -> None:
    together = tensor([1.0, 2, 3, 0, 1, 10, -1])
    expected = tensor([-0.353372, -0.078527, 0.196318, -0.628216, -0.353372, 2.120230, -0.903061])
    assert_close(whitened(together, torch.ones(7).bool()), expected, atol=2e-6, rtol=0)
    assert whitened(tensor([5.0, math.nan]), tensor([True, False])).tolist() == [5.0, 0.0]
    assert whitened(tensor([math.nan]), tensor([False])).tolist() == [0.0]


def test_returns_on_vectors() -> None:
    returns = discounted_returns(REWARDS, MASK, 0.9)
    assert_close(returns, tensor([[0.81, 0.9, 1, 0], [0.81, 0, 0.9, 1]]))
    expected = tensor([[-1.097912, -0.039211, 1.137123, 0], [-1.097912, 0, -0.039211, 1.137123]])
    assert_close(whitened(returns, MASK), expected, atol=2e-6, rtol=0)


def test_gae_on_vectors() -> None:
    found, returns = generalized_advantages(REWARDS, VALUES, MASK, 0.99, 0.95)
    assert_close(found, tensor([[0.413651, 0.5504, 0.8, 0], [0.646829, 0, 0.37515, 0.3]]), atol=2e-6, rtol=0)
    assert_close(returns, tensor([[0.913651, 0.9504, 1, 0], [0.946829, 0, 0.97515, 1]]), atol=2e-6, rtol=0)


@pytest.mark.parametrize("hidden", [0.0, 7.0, -3.0, math.nan, math.inf])
def test_what_stands_at_masked_places_changes_no_advantage(hidden: float) -> None:
    mask = tensor([[1, 1, 0, 1, 0]]).bool()
    values = tensor([[0.5, 0.4, hidden, 0.2, hidden]])
    rewards = last_token_rewards(tensor([1.0]), mask)
    assert rewards.tolist() == [[0, 0, 0, 1, 0]]
    found, returns = generalized_advantages(rewards, values, mask, 0.9, 0.8)
    assert_close(found, tensor([[0.11632, 0.356, 0, 0.8, 0]]), atol=2e-6, rtol=0)
    assert_close(returns, tensor([[0.61632, 0.756, 0, 1.0, 0]]), atol=2e-6, rtol=0)


def test_gae_goes_over_observations_as_if_they_were_not_there() -> None:
    random = np.random.default_rng(5)
    for _ in range(200):
        count, width = int(random.integers(1, 5)), int(random.integers(1, 10))
        mask = torch.from_numpy(random.random((count, width)) < 0.6)
        rewards = torch.tensor(random.normal(size=(count, width)))
        values = torch.tensor(random.normal(size=(count, width)))
        last = torch.tensor(random.normal(size=count))
        gamma, lambda_ = random.random(), random.random()
        found, returns = generalized_advantages(rewards, values, mask, gamma, lambda_, last)
        for i in range(count):
            places = mask[i].nonzero().flatten().tolist()
            advantage, following = 0.0, float(last[i])
            for t in reversed(places):
                delta = float(rewards[i, t]) + gamma * following - float(values[i, t])
                advantage = delta + gamma * lambda_ * advantage
                following = float(values[i, t])
                assert float(found[i, t]) == pytest.approx(advantage, abs=1e-9)
                assert float(returns[i, t]) == pytest.approx(advantage + following, abs=1e-9)
            assert not found[i][~mask[i]].any()


def test_an_observation_between_them_leaves_returns_as_they_are() -> None:
    compact = discounted_returns(tensor([[0.0, 0, 0, 1]]), torch.ones(1, 4).bool(), 0.9)
    mask = tensor([[1, 1, 0, 0, 1, 1]]).bool()
    spread = discounted_returns(tensor([[0.0, 0, 0, 0, 0, 1]]), mask, 0.9)
    assert_close(spread[mask], compact[0])


def test_the_rows_of_a_sample_weigh_as_one_in_its_group() -> None:
    samples = Samples(["g"] * 4, tensor([1.0, 0, 0, 1]), torch.ones(4).bool())
    expected = tensor([0.866024, -0.866024, -0.866024, 0.866024])
    assert_close(advantages("grpo", samples), expected, atol=2e-6, rtol=0)
