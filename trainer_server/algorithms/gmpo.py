"""GMPO: the geometric mean of clipped token ratios (Zhao et al. 2025)."""

import torch
from torch import Tensor

from relax_common.recipe.algorithms import GmpoConfig
from trainer_server.algorithms.base import GroupAlgorithm, Tokens
from trainer_server.maths.policy_loss import TokenLoss, log_ratio, masked, token_loss
from trainer_server.maths.sequences import Sequences


def gmpo(
    log_probs: Tensor,
    anchor: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    eps_low: float,
    eps_high: float,
) -> TokenLoss:
    """-A exp(mean of the bounded log-ratios) at every token of a sample. A log-ratio is bounded on the side that hurts:
    above by eps_high where A > 0, below by -eps_low where A < 0. Inputs [tokens], mask bool."""
    difference = log_ratio(log_probs, anchor, mask)
    advantages = masked(advantages, mask)
    high = (advantages > 0) & (difference > eps_high)
    low = (advantages < 0) & (difference < -eps_low)
    bounded = torch.where(high, torch.full_like(difference, eps_high), difference)
    bounded = torch.where(low, torch.full_like(difference, -eps_low), bounded)
    mean = sequences.spread(sequences.mean(bounded, mask).exp())
    return token_loss(-advantages * mean, difference.exp(), mask, low, high)


class Gmpo(GroupAlgorithm[GmpoConfig]):
    def token_loss(self, tokens: Tokens, anchor: Tensor) -> TokenLoss:
        c = self.config
        return gmpo(tokens.policy, anchor, tokens.advantages, tokens.mask, tokens.sequences, c.eps_low, c.eps_high)
