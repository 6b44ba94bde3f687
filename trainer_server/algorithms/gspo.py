"""GSPO: one importance ratio per sequence, the geometric mean of its tokens' (Zheng et al. 2025)."""

import torch
from torch import Tensor

from relax_common.recipe.algorithms import GspoConfig
from trainer_server.algorithms.base import GroupAlgorithm, Tokens
from trainer_server.maths.policy_loss import TokenLoss, log_ratio, masked, token_loss
from trainer_server.maths.sequences import Sequences

_LOG_LIMIT = 10.0


def gspo(
    log_probs: Tensor,
    anchor: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    eps_low: float,
    eps_high: float,
) -> TokenLoss:
    """max(-A s, -A clip(s)) at every token, s = exp(mean of log pi - log old over the sample's trained tokens). Its
    value is one per sequence; its gradient goes through each token's own pi. Inputs [tokens], mask bool."""
    difference = log_ratio(log_probs, anchor, mask)
    mean = sequences.spread(sequences.mean(difference.detach(), mask))
    own = masked(log_probs, mask)
    ratio = (mean + own - own.detach()).clamp(max=_LOG_LIMIT).exp()
    advantages = masked(advantages, mask)
    plain, bounded = -advantages * ratio, -advantages * ratio.clamp(1 - eps_low, 1 + eps_high)
    clipped = bounded > plain
    loss = torch.maximum(plain, bounded)
    return token_loss(loss, ratio, mask, clipped & (ratio < 1), clipped & (ratio > 1))


class Gspo(GroupAlgorithm[GspoConfig]):
    def token_loss(self, tokens: Tokens, anchor: Tensor) -> TokenLoss:
        c = self.config
        return gspo(tokens.policy, anchor, tokens.advantages, tokens.mask, tokens.sequences, c.eps_low, c.eps_high)
