"""GRPO: advantages relative to the group (Shao et al. 2024, DeepSeekMath); the ratio is clipped higher above than below
(Yu et al. 2025, DAPO)."""

from collections.abc import Sequence

from torch import Tensor

from relax_common.recipe.algorithm import GrpoConfig
from trainer_server.algorithms.base import Algorithm
from trainer_server.maths.advantages import group_advantages
from trainer_server.maths.policy_loss import TokenLoss, ppo_clip


class Grpo(Algorithm[GrpoConfig]):
    def advantages(self, rewards: Tensor, group_ids: Sequence[str], valid: Tensor) -> Tensor:
        return group_advantages(self.config.normalizer, rewards, group_ids, valid)

    def token_loss(self, log_probs: Tensor, anchor: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
        config = self.config
        dual_clip = config.dual_clip or None
        return ppo_clip(log_probs, anchor, advantages, mask, config.eps_low, config.eps_high, dual_clip)
