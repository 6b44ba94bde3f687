"""The whole loss per token: clipped policy gradient, times the correction, plus the KL penalty. Minimised."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer_server.algorithms.spec import AlgorithmSpec
from trainer_server.maths.correction import correction_weights
from trainer_server.maths.kl import kl_per_token
from trainer_server.maths.policy_loss import TokenLoss, ppo_clip


@dataclass(frozen=True)
class LogProbs:
    """Of the tokens [tokens]: under the policy being trained, under the engine that sampled them, at the start of the
    step (where the algorithm asks for it) and under the reference (likewise)."""

    policy: Tensor
    behaviour: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """`kl` and `correction` [tokens] are None where the algorithm has neither."""

    tokens: TokenLoss
    kl: Tensor | None = None
    correction: Tensor | None = None


def objective(spec: AlgorithmSpec, log_probs: LogProbs, advantages: Tensor, mask: Tensor) -> Objective:
    """Inputs [tokens], mask bool. Raises ValueError where log-probs that the algorithm needs are missing."""
    anchor = log_probs.behaviour if spec.old_policy == "behaviour" else _needed(log_probs.old, "old", spec)
    tokens = ppo_clip(log_probs.policy, anchor, advantages, mask, spec.clip_low, spec.clip_high, spec.dual_clip)
    loss, kl, weights = tokens.loss, None, None
    if spec.correction != "none":
        weights = correction_weights(
            spec.correction, anchor, log_probs.behaviour, mask, spec.correction_low, spec.correction_high
        )
        loss = loss * weights
    if spec.kl_coef:
        zero = torch.zeros_like(log_probs.policy)
        reference = _needed(log_probs.reference, "reference", spec)
        # Masked before, not after: the gradient of where(mask, f(NaN), 0) would still be NaN.
        kl = kl_per_token(
            spec.kl, torch.where(mask, log_probs.policy, zero), torch.where(mask, reference, zero)
        )  # fmt: skip
        loss = loss + spec.kl_coef * kl
    return Objective(replace(tokens, loss=loss), kl, weights)


def _needed(values: Tensor | None, name: str, spec: AlgorithmSpec) -> Tensor:
    if values is None:
        raise ValueError(f"{spec.name}: the rows carry no {name} log-probs")
    return values
