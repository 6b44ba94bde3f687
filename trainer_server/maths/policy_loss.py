"""Clipped policy-gradient loss per token (minimised)."""

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class TokenLoss:
    """All [tokens]. `loss` and `ratio` are 0 and 1 where the mask is off; `clipped_*` say on which side the
    clip decided the loss, `dual_clipped` where the dual clip did."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    dual_clipped: Tensor


def log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """log(pi / old), clamped; 0 where the mask is off, even if the inputs are NaN there."""
    difference = masked(log_probs, mask) - masked(old_log_probs, mask)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """max(-A r, -A clip(r)); with `dual_clip` c, for A < 0 no more than -A c. Inputs [tokens], mask bool."""
    ratio = log_ratio(log_probs, old_log_probs, mask).exp()
    advantages = masked(advantages, mask)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, bounded)
    clip_decides = mask & (bounded > plain)
    dual_clipped = torch.zeros_like(mask)
    if dual_clip is not None:
        cap = -advantages * dual_clip
        dual_clipped = mask & (advantages < 0) & (loss > cap)
        loss = torch.where(advantages < 0, torch.minimum(loss, cap), loss)
    return TokenLoss(
        loss=torch.where(mask, loss, torch.zeros_like(loss)),
        ratio=ratio,
        clipped_low=clip_decides & (ratio < 1),
        clipped_high=clip_decides & (ratio > 1),
        dual_clipped=dual_clipped,
    )


def token_loss(
    loss: Tensor, ratio: Tensor, mask: Tensor, low: Tensor | None = None, high: Tensor | None = None
) -> TokenLoss:
    """A loss without a dual clip, 0 where the mask is off. `low` and `high` [tokens]: where it clips or drops."""
    never = torch.zeros_like(mask)
    return TokenLoss(
        loss=torch.where(mask, loss, torch.zeros_like(loss)),
        ratio=ratio,
        clipped_low=never if low is None else mask & low,
        clipped_high=never if high is None else mask & high,
        dual_clipped=never,
    )


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """0 where the mask is off. Inputs are masked and not results: the gradient of where(mask, f(NaN), 0) would still
    be NaN."""
    return torch.where(mask, values, torch.zeros_like(values))
