"""Weights that correct for the engine having sampled with other log-probs (beta) than the policy of the step (old).

rho = exp(log old - log beta), a constant for the gradient. TIS: Yao et al. 2025, "Your efficient RL framework secretly
brings you off-policy RL training"; IcePop: tokens whose rho is outside a band get weight 0.
"""

import torch
from torch import Tensor

from relax_common.recipe.algorithm import Correction
from trainer_server.maths.policy_loss import log_ratio


def correction_weights(name: Correction, old: Tensor, rollout: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """[tokens], 0 where the mask is off. tis: min(rho, high). icepop: rho inside [low, high], else 0."""
    rho = log_ratio(old, rollout, mask).exp().detach()
    zero = torch.zeros_like(rho)
    if name == "tis":
        rho = rho.clamp(max=high)
    elif name == "icepop":
        rho = torch.where((rho >= low) & (rho <= high), rho, zero)
    else:
        rho = torch.ones_like(rho)
    return torch.where(mask, rho, zero)
