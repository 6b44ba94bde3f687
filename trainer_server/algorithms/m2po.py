"""M2PO: the second moment of the log-ratio over an update is bounded (Zheng et al. 2025)."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from relax_common.recipe.algorithms import M2poConfig
from trainer_server.algorithms.base import GroupAlgorithm, Survey, Tokens
from trainer_server.maths.policy_loss import TokenLoss, log_ratio, masked, token_loss
from trainer_server.maths.selection import within_second_moment


class M2po(GroupAlgorithm[M2poConfig]):
    def select(self, survey: Survey) -> NDArray[np.bool_]:
        return within_second_moment(survey.policy - survey.anchor, survey.advantages, self.config.second_moment_max)

    def token_loss(self, tokens: Tokens, anchor: Tensor) -> TokenLoss:
        """-A r at the selected tokens, 0 at the others."""
        ratio = log_ratio(tokens.policy, anchor, tokens.mask).exp()
        kept = tokens.mask if tokens.selected is None else tokens.mask & tokens.selected
        loss = masked(-masked(tokens.advantages, tokens.mask) * ratio, kept)
        return token_loss(loss, ratio, tokens.mask, ~kept & (ratio < 1), ~kept & (ratio > 1))
