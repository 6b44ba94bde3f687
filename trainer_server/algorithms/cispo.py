"""CISPO: the weight of a token is clipped, its gradient is kept (MiniMax 2025)."""

from torch import Tensor

from relax_common.recipe.algorithms import CispoConfig
from trainer_server.algorithms.base import GroupAlgorithm, Tokens
from trainer_server.maths.policy_loss import TokenLoss, log_ratio, masked, token_loss


def cispo(
    log_probs: Tensor, anchor: Tensor, advantages: Tensor, mask: Tensor, eps_low: float, eps_high: float
) -> TokenLoss:
    """-clip(r) A log pi, the clipped ratio a constant. Inputs [tokens], mask bool."""
    ratio = log_ratio(log_probs, anchor, mask).exp()
    weight = ratio.detach().clamp(1 - eps_low, 1 + eps_high)
    loss = -weight * masked(advantages, mask) * masked(log_probs, mask)
    return token_loss(loss, ratio, mask, ratio < 1 - eps_low, ratio > 1 + eps_high)


class Cispo(GroupAlgorithm[CispoConfig]):
    def token_loss(self, tokens: Tokens, anchor: Tensor) -> TokenLoss:
        c = self.config
        return cispo(tokens.policy, anchor, tokens.advantages, tokens.mask, c.eps_low, c.eps_high)
