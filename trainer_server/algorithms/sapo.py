"""SAPO: a smooth gate in place of the clip (Gao et al. 2025)."""

import torch
from torch import Tensor

from relax_common.recipe.algorithms import SapoConfig
from trainer_server.algorithms.base import GroupAlgorithm, Tokens
from trainer_server.maths.policy_loss import TokenLoss, log_ratio, masked, token_loss


def sapo(
    log_probs: Tensor, anchor: Tensor, advantages: Tensor, mask: Tensor, tau_positive: float, tau_negative: float
) -> TokenLoss:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A. At r = 1 its gradient is that of -A r. Inputs [tokens],
    mask bool."""
    ratio = log_ratio(log_probs, anchor, mask).exp()
    advantages = masked(advantages, mask)
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    return token_loss(-advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1)), ratio, mask)


class Sapo(GroupAlgorithm[SapoConfig]):
    def token_loss(self, tokens: Tokens, anchor: Tensor) -> TokenLoss:
        c = self.config
        return sapo(tokens.policy, anchor, tokens.advantages, tokens.mask, c.tau_positive, c.tau_negative)
