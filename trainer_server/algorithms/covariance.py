"""KL-Cov and Clip-Cov: entropy falls at the few tokens where log-prob and advantage are both high; they are held back
(Cui et al. 2025, the entropy mechanism)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_common.recipe.algorithms import ClipCovConfig, KlCovConfig
from trainer_server.algorithms.base import GroupAlgorithm, Survey, Tokens
from trainer_server.maths.policy_loss import TokenLoss, log_ratio, masked, ppo_clip, token_loss
from trainer_server.maths.selection import drawn_covariances, highest_covariances


class KlCov(GroupAlgorithm[KlCovConfig]):
    def select(self, survey: Survey) -> NDArray[np.bool_]:
        return highest_covariances(survey.policy, survey.advantages, self.config.share)

    def token_loss(self, tokens: Tokens, anchor: Tensor) -> TokenLoss:
        """-A r, at the selected tokens plus penalty |log r|."""
        difference = log_ratio(tokens.policy, anchor, tokens.mask)
        loss = -masked(tokens.advantages, tokens.mask) * difference.exp()
        if tokens.selected is not None:
            loss = loss + self.config.penalty * masked(difference.abs(), tokens.mask & tokens.selected)
        return token_loss(loss, difference.exp(), tokens.mask)


class ClipCov(GroupAlgorithm[ClipCovConfig]):
    def select(self, survey: Survey) -> NDArray[np.bool_]:
        c = self.config
        everything = torch.ones(len(survey.policy), dtype=torch.bool)
        policy, anchor, advantages = map(torch.from_numpy, (survey.policy, survey.anchor, survey.advantages))
        plain = ppo_clip(policy, anchor, advantages, everything, c.eps_low, c.eps_high)
        return drawn_covariances(
            survey.policy,
            survey.advantages,
            (plain.clipped_low | plain.clipped_high).numpy(),
            c.share,
            c.covariance_low,
            c.covariance_high,
            survey.seed,
        )

    def token_loss(self, tokens: Tokens, anchor: Tensor) -> TokenLoss:
        """The clipped loss, 0 at the selected tokens."""
        c = self.config
        kept = tokens.mask if tokens.selected is None else tokens.mask & ~tokens.selected
        result = ppo_clip(tokens.policy, anchor, tokens.advantages, tokens.mask, c.eps_low, c.eps_high)
        dropped = tokens.mask & ~kept
        return token_loss(
            masked(result.loss, kept),
            result.ratio,
            tokens.mask,
            result.clipped_low | (dropped & (result.ratio < 1)),
            result.clipped_high | (dropped & (result.ratio >= 1)),
        )
