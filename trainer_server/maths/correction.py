"""Weights that correct for the engine having sampled with other log-probs (beta) than the policy of the step (old).

rho = exp(log old - log beta), a constant for the gradient. TIS: Yao et al. 2025, "Your efficient RL framework secretly
brings you off-policy RL training"; IcePop: tokens whose rho is outside a band get weight 0. The denominators of the
step count the tokens before any of it.
"""

import math

import torch
from torch import Tensor

from relax_common.recipe.algorithm import Correction, CorrectionLevel, Rejection, RejectionLevel
from trainer_server.maths.policy_loss import LOG_RATIO_LIMIT, log_ratio
from trainer_server.maths.sequences import Sequences


def correction_weights(
    name: Correction,
    level: CorrectionLevel,
    old: Tensor,
    rollout: Tensor,
    mask: Tensor,
    sequences: Sequences,
    low: float,
    high: float,
) -> Tensor:
    """[tokens], 0 where the mask is off. tis: min(rho, high). icepop: rho inside [low, high], else 0. `level`: each
    token's rho, or one for all tokens of a sample: the product or the geometric mean of theirs."""
    log_rho = log_ratio(old, rollout, mask).detach()
    if level == "sequence":
        log_rho = sequences.spread(sequences.sum(log_rho, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    elif level == "geometric":
        log_rho = sequences.spread(sequences.mean(log_rho, mask))
    rho = log_rho.exp()
    if name == "tis":
        rho = rho.clamp(max=high)
    elif name == "icepop":
        rho = torch.where((rho >= low) & (rho <= high), rho, torch.zeros_like(rho))
    else:
        rho = torch.ones_like(rho)
    return torch.where(mask, rho, torch.zeros_like(rho))


def divergence(name: Rejection, log_rho: Tensor) -> Tensor:
    """k1 = log rho, k2 = (log rho)^2 / 2, k3 = rho - 1 - log rho: what the samples of beta say of old."""
    if name == "k1":
        return log_rho
    if name == "k2":
        return log_rho.square() / 2
    return log_rho.exp() - 1 - log_rho


def accepted(
    name: Rejection,
    level: RejectionLevel,
    old: Tensor,
    rollout: Tensor,
    mask: Tensor,
    sequences: Sequences,
    low: float,
    high: float,
) -> Tensor:
    """[tokens] bool: whether the sample of a token is inside the bounds. `low` and `high` are values of rho: a sample
    is rejected if its divergence is beyond that of a single token with such a rho. Only k1 has a lower bound."""
    if name == "none":
        return mask
    log_rho = log_ratio(old, rollout, mask).detach()
    values = divergence(name, log_rho)
    most = float(divergence(name, torch.tensor(math.log(high))))
    least = math.log(low) if name == "k1" and low > 0 else -math.inf
    if level == "max":
        outside = (values > most) | (values < least)
        inside = sequences.sum(outside.float(), mask) == 0
    else:
        total = (sequences.mean if level == "mean" else sequences.sum)(values, mask)
        inside = (total <= most) & (total >= least)
    return mask & sequences.spread(inside)
