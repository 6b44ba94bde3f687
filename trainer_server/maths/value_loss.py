"""The critic's loss."""

import torch
from torch import Tensor

from trainer_server.maths.policy_loss import masked


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """(0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), where the clip decides it), both [tokens]; 0
    where the mask is off. Inputs [tokens] (Schulman et al. 2017)."""
    if not values.shape == old_values.shape == returns.shape == mask.shape:
        raise ValueError(f"values {tuple(values.shape)} and returns {tuple(returns.shape)} differ in shape")
    values, old_values, returns = masked(values, mask), masked(old_values, mask), masked(returns, mask)
    bounded = old_values + (values - old_values).clamp(-clip, clip)
    plain, clipped = (values - returns).square(), (bounded - returns).square()
    return 0.5 * torch.maximum(plain, clipped), mask & (clipped > plain)
