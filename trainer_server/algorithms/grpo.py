"""GRPO: advantages relative to the group (Shao et al. 2024, DeepSeekMath); the ratio is clipped higher above than below
(Yu et al. 2025, DAPO).

Dr.GRPO, DAPO, MaxRL and decoupled PPO are the same maths with other keys.
"""

from typing import TypeVar

from torch import Tensor

from relax_common.recipe.algorithms import ClippedConfig
from trainer_server.algorithms.base import GroupAlgorithm, Tokens
from trainer_server.maths.policy_loss import TokenLoss, ppo_clip

Config = TypeVar("Config", bound=ClippedConfig)


class ClippedAlgorithm(GroupAlgorithm[Config]):
    """The clipped loss of GRPO, with any advantages."""

    def token_loss(self, tokens: Tokens, anchor: Tensor) -> TokenLoss:
        config = self.config
        return ppo_clip(
            tokens.policy,
            anchor,
            tokens.advantages,
            tokens.mask,
            config.eps_low,
            config.eps_high,
            config.dual_clip or None,
        )


class Grpo(ClippedAlgorithm[ClippedConfig]):
    """The algorithm, and those that only set its keys."""
