"""Every loss, correction, KL and aggregation against an independent float64 implementation, on ragged samples of one or
several rows, in any split into packs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from reference_losses import LOSSES, total_loss
from torch import Tensor

from relax_common.recipe.algorithms import KINDS, OpdConfig, name_of
from trainer_server.algorithms import Algorithm, Samples, Tokens, make_algorithm
from trainer_server.algorithms.opd import reverse_kl_loss
from trainer_server.maths.aggregation import StepCounts, masked_sum
from trainer_server.maths.sequences import Sequences

CASES = 200
OF_NAME = {name_of(kind): kind for kind in KINDS}
EXTRA: dict[str, dict[str, Any]] = {
    "dr_grpo": {"aggregation_constant": 7.0},
    "cispo": {"eps_high": 0.28},
}
AGGREGATIONS = ("token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean")


@dataclass(frozen=True)
class Batch:
    """Samples with mask; each tensor [samples][tokens], float32, at masked tokens NaN."""

    columns: dict[str, list[Tensor]]
    masks: list[Tensor]


def draw(random: np.random.Generator, extreme: bool = False) -> Batch:
    """Up to 9 samples of 0 to 12 tokens, some empty, some wholly masked."""
    masks, columns = [], {name: [] for name in ("pi", "old", "beta", "ref", "A")}
    for _ in range(int(random.integers(1, 10))):
        length = int(random.integers(1, 13))
        mask = torch.from_numpy(random.random(length) < random.choice([0.0, 0.6, 1.0]))
        spread = 12.0 if extreme else 0.5
        base = -random.random(length) * 3 - 0.05
        sample = {
            "pi": base,
            "old": np.minimum(base + random.normal(0, spread, length), -0.01),
            "beta": np.minimum(base + random.normal(0, spread, length), -0.01),
            "ref": np.minimum(base + random.normal(0, 0.5, length), -0.01),
            "A": np.full(length, random.choice([0.0, random.normal()])),
        }
        masks.append(mask)
        for name, values in sample.items():
            values[~mask.numpy()] = math.nan
            columns[name].append(torch.tensor(values, dtype=torch.float32))
    return Batch(columns, masks)


def ours(algorithm: Algorithm[Any], batch: Batch, split: Sequence[Sequence[int]]) -> tuple[float, list[Tensor]]:
    """(loss, gradient of each sample's log-probs), the samples in packs as in `split`."""
    total = torch.zeros((), dtype=torch.float64)
    policies = [values.clone().requires_grad_() for values in batch.columns["pi"]]
    for pack in split:
        lengths = [len(batch.masks[i]) for i in pack]
        flat = {name: torch.cat([values[i] for i in pack]) for name, values in batch.columns.items()}
        mask = torch.cat([batch.masks[i] for i in pack])
        weights = torch.cat(
            [torch.full((len(batch.masks[i]),), algorithm.token_weight(int(batch.masks[i].sum()))) for i in pack]
        )
        tokens = Tokens(
            policy=torch.cat([policies[i] for i in pack]),
            rollout=flat["beta"],
            advantages=flat["A"],
            mask=mask,
            sequences=Sequences.of(lengths),
            old=flat["old"],
            reference=flat["ref"],
        )
        total = total + masked_sum(algorithm.objective(tokens).tokens.loss, weights, mask).double()
    counts = StepCounts(int(sum(m.sum() for m in batch.masks)), sum(bool(m.any()) for m in batch.masks))
    loss = total / max(algorithm.divisor(counts), 1.0)
    loss.backward()
    return float(loss), [p.grad if p.grad is not None else torch.zeros_like(p) for p in policies]


def reference(keys: dict[str, Any], batch: Batch) -> tuple[float, list[Tensor]]:
    policies = [
        values[mask].double().requires_grad_() for values, mask in zip(batch.columns["pi"], batch.masks, strict=True)
    ]
    samples = []
    for i, (policy, mask) in enumerate(zip(policies, batch.masks, strict=True)):
        if mask.any():
            rest = {name: batch.columns[name][i][mask].double() for name in ("old", "beta", "ref", "A")}
            samples.append({"pi": policy, **rest})
    loss = total_loss(samples, keys)
    if loss.requires_grad:
        loss.backward()
    gradients = []
    for policy, mask in zip(policies, batch.masks, strict=True):
        whole = torch.zeros(len(mask), dtype=torch.float64)
        whole[mask] = torch.zeros_like(policy) if policy.grad is None else policy.grad
        gradients.append(whole)
    return float(loss), gradients


def random_split(random: np.random.Generator, count: int) -> list[list[int]]:
    order = random.permutation(count).tolist()
    cuts = sorted(random.integers(0, count + 1, int(random.integers(0, 4))).tolist())
    return [part for start, end in zip([0, *cuts], [*cuts, count], strict=True) if (part := order[start:end])]


def check(keys: dict[str, Any], seed: int, cases: int = CASES, extreme: bool = False) -> None:
    config = OF_NAME[keys["name"]].model_validate(keys)
    algorithm = make_algorithm(config)
    random = np.random.default_rng(seed)
    for _ in range(cases):
        batch = draw(random, extreme)
        expected, gradients = reference(config.model_dump(), batch)
        found, found_gradients = ours(algorithm, batch, random_split(random, len(batch.masks)))
        scale = 1e-6 * max(1.0, abs(expected)) * (10 if extreme else 1)
        assert math.isclose(found, expected, rel_tol=3e-6, abs_tol=scale), (found, expected)
        for mine, theirs in zip(found_gradients, gradients, strict=True):
            torch.testing.assert_close(
                mine.double(), theirs, rtol=2e-5, atol=2e-6 * max(1.0, float(theirs.abs().max()))
            )


@pytest.mark.parametrize("name", list(LOSSES))
def test_a_loss_and_its_gradient(name: str) -> None:
    check({"name": name, **EXTRA.get(name, {})}, seed=1)


@pytest.mark.parametrize("name", ["grpo", "gspo", "gmpo", "sapo", "cispo", "dppo_tv", "opsm", "rloo"])
def test_a_loss_where_ratios_are_extreme(name: str) -> None:
    check({"name": name, **EXTRA.get(name, {})}, seed=2, extreme=True)


def test_the_dual_clip() -> None:
    check({"name": "grpo", "dual_clip": 1.2}, seed=3)


@pytest.mark.parametrize("kl", ["k1", "abs", "k2", "k3", "k3+"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_a_kl_in_the_loss(kl: str, unbiased: bool) -> None:
    check({"name": "grpo", "kl": kl, "kl_loss_coef": 0.3, "kl_unbiased": unbiased}, seed=4)


@pytest.mark.parametrize("correction", ["tis", "icepop"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_correction(correction: str, level: str) -> None:
    keys = {"correction": correction, "correction_level": level, "correction_low": 0.8, "correction_high": 1.25}
    check({"name": "grpo", "old_policy": "actor_fwd", **keys}, seed=5)


@pytest.mark.parametrize("rejection", ["k1", "k2", "k3"])
@pytest.mark.parametrize("level", ["sum", "mean", "max"])
def test_a_rejection(rejection: str, level: str) -> None:
    keys = {"rejection": rejection, "rejection_level": level, "rejection_high": 1.4}
    low = {"rejection_low": 0.75} if rejection == "k1" else {}
    check({"name": "gspo", "old_policy": "actor_fwd", **keys, **low}, seed=6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_I9_an_aggregation(name: str, aggregation: str) -> None:
    constant = {"aggregation_constant": 5.0} if aggregation == "seq_mean_token_sum_norm" else {}
    check({"name": name, "aggregation": aggregation, **constant}, seed=7)


@pytest.mark.parametrize("name", [name for name in OF_NAME if name != "custom"])
def test_a_number_that_is_none_on_a_trained_token_is_seen_and_not_hidden(name: str) -> None:
    keys = {"name": name, **EXTRA.get(name, {})}
    algorithm = make_algorithm(OF_NAME[name].model_validate(keys))
    values = torch.tensor([-1.0, math.nan])
    mask = torch.ones(2, dtype=torch.bool)
    tokens = Tokens(values, values.nan_to_num(-1.0), torch.ones(2), mask, Sequences.of([2]), old=torch.full((2,), -1.0))
    assert not torch.isfinite(algorithm.objective(tokens).tokens.loss.sum())


# On-policy distillation.


def _three_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(probabilities, log-probs); averages over them are exact expectations over samples."""
    log_probs = logits.log_softmax(0)
    return log_probs.exp().detach(), log_probs


@pytest.mark.parametrize("sampled_by", [[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
def test_distillation_as_a_loss_has_the_gradient_of_the_reverse_kl(sampled_by: list[float]) -> None:
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log().requires_grad_()
    teacher = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    _, log_probs = _three_tokens(logits)
    sampled = torch.tensor(sampled_by, dtype=torch.float64)
    loss = reverse_kl_loss(log_probs, teacher, sampled.log(), torch.ones(3).bool())
    (sampled * loss).sum().backward()
    expected = torch.tensor([0.320702, -0.082466, -0.238236], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, expected, atol=1e-6, rtol=0)


def test_distillation_as_an_advantage_has_the_same_gradient() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log().requires_grad_()
    teacher = torch.tensor([0.2, 0.3, 0.5]).log()
    probabilities, log_probs = _three_tokens(logits)
    anchor = log_probs.detach().float()
    algorithm = make_algorithm(OpdConfig())
    one = torch.ones(1, 3).bool()
    samples = Samples(["g"], torch.zeros(1), torch.ones(1).bool(), mask=one, anchor=anchor[None], teacher=teacher[None])
    advantages = algorithm.advantages(samples)[0]
    tokens = Tokens(log_probs, anchor.double(), advantages.double(), one[0], Sequences.of([3]))
    (probabilities * algorithm.objective(tokens).tokens.loss).sum().backward()
    expected = torch.tensor([0.320702, -0.082466, -0.238236], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, expected, atol=2e-6, rtol=0)


def test_I11_without_a_teacher_there_is_no_distillation() -> None:
    algorithm = make_algorithm(OpdConfig(distill_as="loss"))
    values, mask = torch.tensor([-1.0]), torch.ones(1).bool()
    with pytest.raises(ValueError, match="no teacher log-probs"):
        algorithm.objective(Tokens(values, values, torch.zeros(1), mask, Sequences.of([1])))
