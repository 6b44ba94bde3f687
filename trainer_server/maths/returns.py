"""Returns and advantages over the tokens of a sample, and whitening.

All take [samples, tokens] with a mask; a sample's rows stand one after another. Tokens without mask (observations of a
tool, padding) are passed over: no discount, no value, no reward of theirs counts.
"""

import torch
from torch import Tensor

_WHITEN_FLOOR = 1e-8


def last_token_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """rewards [samples] -> [samples, tokens] with each reward at its sample's last token with mask 1."""
    placed = torch.zeros(mask.shape, dtype=rewards.dtype)
    has = mask.any(1)
    last = mask.size(1) - 1 - mask.flip(1).int().argmax(1)
    placed[has, last[has]] = rewards[has]
    return placed


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_next, over tokens with mask 1; 0 elsewhere."""
    returns = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0]) if rewards.size(1) else rewards.sum(1)
    for t in reversed(range(rewards.size(1))):
        here = mask[:, t]
        following = torch.where(here, rewards[:, t] + gamma * following, following)
        returns[:, t] = torch.where(here, following, torch.zeros_like(following))
    return returns


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lambda_: float, last_values: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(advantages, returns = advantages + values), 0 where the mask is off (Schulman et al. 2016).

    delta_t = r_t + gamma V_next - V_t and A_t = delta_t + gamma lambda A_next, where "next" is the next token with mask
    1. After the last one comes `last_values` [samples]: 0 where the sample has ended."""
    advantages = torch.zeros_like(rewards)
    next_value = torch.zeros(len(rewards), dtype=rewards.dtype) if last_values is None else last_values
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(range(rewards.size(1))):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(here, delta + gamma * lambda_ * next_advantage, next_advantage)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = torch.where(here, next_advantage, torch.zeros_like(next_advantage))
    returns = torch.where(mask, advantages + values, torch.zeros_like(values))
    return advantages, returns


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """(values - mean) / sqrt(variance + 1e-8) over all values with mask 1, unbiased variance; 0 elsewhere. Fewer than
    two values stay as they are."""
    kept = torch.where(mask, values, torch.zeros_like(values))
    n = int(mask.sum())
    if n < 2:
        return kept
    exact = kept.double()
    mean = exact.sum() / n
    variance = (torch.where(mask, exact - mean, torch.zeros_like(exact)).square().sum()) / (n - 1)
    scaled = (exact - mean) / (variance + _WHITEN_FLOOR).sqrt()
    return torch.where(mask, scaled, torch.zeros_like(scaled)).to(values.dtype)
