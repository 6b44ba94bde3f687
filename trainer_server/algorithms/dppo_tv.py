"""Divergence PPO with total variation: a token is dropped by how far its probability has moved, not by its ratio
(Qi et al. 2026)."""

from torch import Tensor

from relax_common.recipe.algorithms import DppoTvConfig
from trainer_server.algorithms.base import GroupAlgorithm, Tokens
from trainer_server.maths.policy_loss import TokenLoss, log_ratio, masked, token_loss


def dppo_tv(
    log_probs: Tensor, anchor: Tensor, advantages: Tensor, mask: Tensor, delta_low: float, delta_high: float
) -> TokenLoss:
    """-A r, 0 where pi - old > delta_high and A > 0, or old - pi > delta_low and A < 0. Inputs [tokens], mask bool."""
    ratio = log_ratio(log_probs, anchor, mask).exp()
    advantages = masked(advantages, mask)
    moved = (masked(log_probs, mask).exp() - masked(anchor, mask).exp()).detach()
    high = (advantages > 0) & (moved > delta_high)
    low = (advantages < 0) & (-moved > delta_low)
    loss = masked(-advantages * ratio, ~(high | low))
    return token_loss(loss, ratio, mask, low, high)


class DppoTv(GroupAlgorithm[DppoTvConfig]):
    def token_loss(self, tokens: Tokens, anchor: Tensor) -> TokenLoss:
        c = self.config
        return dppo_tv(tokens.policy, anchor, tokens.advantages, tokens.mask, c.delta_low, c.delta_high)
