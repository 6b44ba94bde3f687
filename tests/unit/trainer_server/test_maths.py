"""The definitions of the algorithms, by their vectors."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from relax_common.recipe.algorithms import GrpoConfig
from trainer_server.algorithms import Algorithm, Tokens, make_algorithm
from trainer_server.maths.advantages import group_advantages
from trainer_server.maths.aggregation import StepCounts, masked_sum
from trainer_server.maths.correction import correction_weights
from trainer_server.maths.kl import kl_per_token
from trainer_server.maths.policy_loss import ppo_clip
from trainer_server.maths.sequences import Sequences

REWARDS = tensor([1, 0, 0, 1, 1, 1, 1, 0, 0.5])
GROUPS = ["a"] * 4 + ["b"] * 4 + ["c"]
ALL_VALID = torch.ones(9, dtype=torch.bool)
MASK = tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]).bool()
OLD = tensor([[-1.0, -0.5, -2.0, -0.3], [-0.7, -1.2, -0.4, -0.9], [-1.5, -0.2, -0.6, -1.1]])
NEW = tensor([[-0.6, -0.9, -0.7, -0.3], [-0.9, -1.1, -0.1, -2.0], [-1.4, -1.5, -0.6, -0.8]])
REFERENCE = tensor([[-0.9, -0.6, -1.5, -0.3], [-0.7, -1.0, -0.5, -1.0], [-1.5, -0.4, -0.5, -1.1]])
BEHAVIOUR = tensor([[-1.1, -0.5, -2.9, -0.3], [-0.7, -1.0, -0.4, -0.8], [-1.0, -0.2, -0.6, -1.1]])
ADVANTAGES = tensor([[1.0], [-0.5], [-2.0]]).expand(3, 4)
PPO_TOKENS = tensor([[-1.2, -0.67032, -1.2, 0], [0.409365, 0.552585, 0.674929, 0.4], [2.210342, 1.6, 0, 0]])


def algorithm(**changes: object) -> Algorithm[Any]:
    return make_algorithm(GrpoConfig(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("group_mean_std", [0.866024, -0.866024, -0.866024, 0.866024, 0.499999, 0.499999, 0.499999, -1.499997, 0]),
        ("group_mean", [0.5, -0.5, -0.5, 0.5, 0.25, 0.25, 0.25, -0.75, 0]),
        ("leave_one_out", [0.666667, -0.666667, -0.666667, 0.666667, 0.333333, 0.333333, 0.333333, -1, 0]),
    ],
)
def test_group_estimators_on_vectors(name: str, expected: list[float]) -> None:
    assert_close(group_advantages(name, REWARDS, GROUPS, ALL_VALID), tensor(expected), atol=2e-6, rtol=0)


def test_groups_are_told_apart_by_id_not_by_position() -> None:
    order = [8, 3, 5, 0, 7, 2, 4, 1, 6]
    shuffled = group_advantages("group_mean_std", REWARDS[order], [GROUPS[i] for i in order], ALL_VALID)
    assert_close(shuffled, group_advantages("group_mean_std", REWARDS, GROUPS, ALL_VALID)[order])


def test_equal_rewards_that_round_differently_from_their_mean_give_exactly_zero() -> None:
    rewards = torch.full((7,), 0.1)
    assert group_advantages("group_mean_std", rewards, ["a"] * 7, torch.ones(7).bool()).tolist() == [0.0] * 7


def test_I11_invalid_and_non_finite_rewards_change_nothing_and_get_zero() -> None:
    rewards = tensor([1.0, 0.0, 9.0, math.nan, math.inf])
    valid = tensor([True, True, False, True, True])
    assert group_advantages("group_mean", rewards, ["a"] * 5, valid).tolist() == [0.5, -0.5, 0, 0, 0]


def _ppo(clip_high: float = 0.2) -> Tensor:
    return ppo_clip(NEW, OLD, ADVANTAGES, MASK, 0.2, clip_high).loss


def test_ppo_clip_on_vectors() -> None:
    assert_close(_ppo(), PPO_TOKENS, atol=2e-6, rtol=0)


def test_clip_higher_on_vectors() -> None:
    assert_close(_ppo(0.28)[0], tensor([-1.28, -0.67032, -1.28, 0]), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("ratios", "advantages", "cap", "expected"),
    [([2, 2, 0.5], [2, -2, 2], 1.5, [-2.4, 3.0, -1.0]), ([0.5, 1, 10], [1, -1, -4], 3, [-0.5, 1, 12])],
)
def test_dual_clip_on_vectors(ratios: list[float], advantages: list[float], cap: float, expected: list[float]) -> None:
    new = tensor(ratios).float().log()
    loss = ppo_clip(new, torch.zeros(3), tensor(advantages).float(), torch.ones(3).bool(), 0.2, 0.2, cap)
    assert_close(loss.loss, tensor(expected).float(), atol=2e-6, rtol=0)
    assert loss.dual_clipped.any()


def test_log_ratio_is_clamped() -> None:
    one = torch.ones(1).bool()
    loss = ppo_clip(tensor([50.0]), tensor([0.0]), tensor([-1.0]), one, 0.2, 0.2)
    assert_close(loss.ratio, tensor([math.exp(20.0)]))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_lies_under_the_mask_reaches_neither_loss_nor_gradient(poison: float) -> None:
    new = torch.where(MASK, NEW, tensor(poison)).requires_grad_()
    old = torch.where(MASK, OLD, tensor(poison))
    advantages = torch.where(MASK, ADVANTAGES, tensor(poison))
    loss = ppo_clip(new, old, advantages, MASK, 0.2, 0.28)
    total = masked_sum(loss.loss, torch.ones(3, 4), MASK)
    total.backward()
    assert torch.isfinite(total)
    assert new.grad is not None
    assert torch.isfinite(new.grad).all()
    assert (new.grad[~MASK] == 0).all()


def test_kl_means_on_vectors() -> None:
    expected = {"k1": -0.122222, "abs": 0.477778, "k2": 0.180556, "k3": 0.229354, "k3+": 0.229354}
    for name, mean in expected.items():
        assert float(kl_per_token(name, NEW, REFERENCE)[MASK].mean()) == pytest.approx(mean, abs=2e-6)


def test_k3_plus_has_the_gradient_of_k2() -> None:
    one, other = NEW.clone().requires_grad_(), NEW.clone().requires_grad_()
    kl_per_token("k3+", one, REFERENCE).sum().backward()
    kl_per_token("k2", other, REFERENCE).sum().backward()
    assert_close(one.grad, other.grad)


@pytest.mark.parametrize(
    ("aggregation", "constant", "expected"),
    [
        ("token_mean", None, 0.308545),
        ("token_sum", None, 2.776902),
        ("seq_mean_token_sum", None, 0.925634),
        ("seq_mean_token_sum_norm", 4.0, 0.231409),
        ("seq_mean_token_mean", None, 0.46365),
    ],
)
def test_I9_aggregation_is_a_sum_over_any_split_and_one_division(
    aggregation: str, constant: float | None, expected: float
) -> None:
    spec = algorithm(aggregation=aggregation, aggregation_constant=constant or 0.0)
    tokens = MASK.sum(1)
    total = torch.zeros(())
    for row in range(3):  # each row its own micro-batch
        weight = spec.token_weight(int(tokens[row]))
        total += masked_sum(PPO_TOKENS[row], torch.full((4,), weight), MASK[row])
    assert float(total) / spec.divisor(StepCounts(9, 3)) == pytest.approx(expected, abs=2e-6)


def test_token_mean_differs_from_the_mean_of_row_means() -> None:
    losses, mask = tensor([[1.0, 2, 3], [4, 5, 6]]), tensor([[1, 1, 0], [1, 1, 1]]).bool()
    total = float(masked_sum(losses, torch.ones(2, 3), mask))
    assert total / algorithm().divisor(StepCounts(5, 2)) == pytest.approx(3.6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"aggregation": "seq_mean_token_sum_norm"},
        {"aggregation_constant": 4.0},
        {"dual_clip": 1.0},
        {"eps_low": 0.0},
        {"aggregation": "seq_mean_token_sum_norm", "aggregation_constant": 0.5},
        {"correction": "tis"},
        {"old_policy": "actor_fwd", "correction": "icepop", "correction_low": 3.0},
    ],
)
def test_contradictory_algorithm_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="1 validation error"):
        algorithm(**wrong)


def weights(name: str, low: float = 0.5, high: float = 2.0) -> Tensor:
    flat = (each.flatten() for each in (OLD, BEHAVIOUR, MASK))
    return correction_weights(name, "token", *flat, Sequences.of([4, 4, 4]), low, high).view(3, 4)


def test_correction_weights_on_vectors() -> None:
    tis = weights("tis")
    expected = [[1.105171, 1.0, 2.0, 0.0], [1.0, 0.818731, 1.0, 0.904837], [0.606531, 1.0, 0.0, 0.0]]
    assert_close(tis, tensor(expected), atol=2e-6, rtol=0)
    # Outside the band a token counts for nothing, inside it keeps its weight.
    icepop = weights("icepop", 0.65)
    assert_close(icepop, torch.where((tis < 0.65) | (tis == 2.0), torch.zeros_like(tis), tis))
    assert (weights("none") == MASK).all()


def seen(**changes: torch.Tensor | None) -> Tokens:
    """Three samples of four tokens."""
    given: dict[str, Any] = {
        "policy": NEW,
        "rollout": BEHAVIOUR,
        "advantages": ADVANTAGES,
        "mask": MASK,
        "old": OLD,
        "reference": REFERENCE,
    }
    flat = {name: None if each is None else each.flatten() for name, each in (given | changes).items()}
    return Tokens(sequences=Sequences.of([4, 4, 4]), **flat)


def test_anchored_at_the_rollout_the_other_log_probs_change_nothing() -> None:
    plain = algorithm().objective(seen())
    assert plain.kl is None
    assert plain.correction is None
    assert_close(plain.tokens.loss.view(3, 4), ppo_clip(NEW, BEHAVIOUR, ADVANTAGES, MASK, 0.2, 0.28).loss)


@pytest.mark.parametrize("correction", ["tis", "icepop"])
def test_a_correction_multiplies_the_loss_anchored_at_the_old_policy(correction: str) -> None:
    spec = algorithm(old_policy="actor_fwd", correction=correction, correction_low=0.65)
    found = spec.objective(seen())
    anchored = ppo_clip(NEW, OLD, ADVANTAGES, MASK, 0.2, 0.28).loss
    assert_close(found.tokens.loss.view(3, 4), anchored * weights(correction, 0.65))
    assert not torch.equal(found.tokens.loss.view(3, 4), anchored)


@pytest.mark.parametrize("kl", ["k1", "abs", "k2", "k3", "k3+"])
def test_the_penalty_is_added_per_token_with_its_coefficient(kl: str) -> None:
    new = NEW.clone().requires_grad_()
    spec = algorithm(kl=kl, kl_loss_coef=0.5)
    found = spec.objective(seen(policy=new, old=None))
    plain = ppo_clip(NEW, BEHAVIOUR, ADVANTAGES, MASK, 0.2, 0.28).loss
    assert_close((found.tokens.loss.view(3, 4) - plain)[MASK], 0.5 * kl_per_token(kl, NEW, REFERENCE)[MASK])
    found.tokens.loss.sum().backward()
    assert new.grad is not None
    assert (new.grad[~MASK] == 0).all()


def test_what_lies_under_the_mask_reaches_no_part_of_the_objective() -> None:
    poisoned = {name: torch.where(MASK, values, tensor(math.nan)) for name, values in
                {"old": OLD, "reference": REFERENCE}.items()}  # fmt: skip
    new = torch.where(MASK, NEW, tensor(math.nan)).requires_grad_()
    behaviour = torch.where(MASK, BEHAVIOUR, tensor(math.nan))
    spec = algorithm(old_policy="actor_fwd", correction="tis", kl_loss_coef=0.1)
    total = masked_sum(
        spec.objective(seen(policy=new, rollout=behaviour, **poisoned)).tokens.loss, torch.ones(12), MASK.flatten()
    )
    total.backward()
    assert torch.isfinite(total)
    assert new.grad is not None
    assert torch.isfinite(new.grad).all()


@pytest.mark.parametrize(
    ("spec", "missing"),
    [(algorithm(old_policy="actor_fwd"), "old"), (algorithm(kl_loss_coef=0.1), "reference")],
)
def test_log_probs_that_the_algorithm_needs_must_be_there(spec: Algorithm[Any], missing: str) -> None:
    with pytest.raises(ValueError, match=f"no {missing} log-probs"):
        spec.objective(seen(old=None, reference=None))


@pytest.mark.parametrize(
    ("spec", "roles"),
    [
        (algorithm(), ()),
        (algorithm(old_policy="actor_fwd"), ("actor_fwd",)),
        (algorithm(old_policy="actor_fwd", kl_loss_coef=0.1), ("actor_fwd", "reference")),
    ],
)
def test_an_algorithm_names_the_roles_it_waits_for(spec: Algorithm[Any], roles: tuple[str, ...]) -> None:
    assert spec.config.roles == roles


@pytest.mark.parametrize("name", ["tis", "icepop", "none"])
def test_correction_weights_carry_no_gradient(name: str) -> None:
    old, behaviour = OLD.clone().requires_grad_(), BEHAVIOUR.clone().requires_grad_()
    flat = (each.flatten() for each in (old, behaviour, MASK))
    assert not correction_weights(name, "token", *flat, Sequences.of([4, 4, 4]), 0.5, 2.0).requires_grad
