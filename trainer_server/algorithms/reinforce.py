"""RLOO (Ahmadian et al. 2024), and REINFORCE++ with and without the group's baseline (Hu et al. 2025)."""

from typing import TypeVar

from torch import Tensor

from relax_common.recipe.algorithms import ReinforcePpBaselineConfig, ReinforcePpConfig, RlooConfig
from trainer_server.algorithms.base import Algorithm, GroupAlgorithm, Samples, Tokens
from trainer_server.maths.policy_loss import TokenLoss, log_ratio, masked, ppo_clip, token_loss
from trainer_server.maths.returns import discounted_returns, last_token_rewards, whitened

Config = TypeVar("Config", ReinforcePpConfig, ReinforcePpBaselineConfig)


class Rloo(GroupAlgorithm[RlooConfig]):
    def token_loss(self, tokens: Tokens, anchor: Tensor) -> TokenLoss:
        """-A log pi: no ratio, so the tokens should be nearly those of the policy being trained."""
        loss = -masked(tokens.advantages, tokens.mask) * masked(tokens.policy, tokens.mask)
        return token_loss(loss, log_ratio(tokens.policy, anchor, tokens.mask).exp(), tokens.mask)


def _clipped(config: ReinforcePpConfig | ReinforcePpBaselineConfig, tokens: Tokens, anchor: Tensor) -> TokenLoss:
    return ppo_clip(tokens.policy, anchor, tokens.advantages, tokens.mask, config.eps_low, config.eps_high)


class ReinforcePp(Algorithm[ReinforcePpConfig]):
    def advantages(self, samples: Samples) -> Tensor:
        """The reward stands at the last trained token, the KL at each; discounted to the end, whitened over the
        tokens of the step. Samples without a valid reward get 0 and change no statistic."""
        mask = self._needed(samples.mask, "mask") & samples.valid[:, None].bool()
        rewards = last_token_rewards(samples.rewards.float(), mask)
        penalty = self.reward_penalty(samples)
        if penalty is not None:
            rewards = rewards - masked(penalty, mask)
        return whitened(discounted_returns(rewards, mask, self.config.gamma), mask)

    def token_loss(self, tokens: Tokens, anchor: Tensor) -> TokenLoss:
        return _clipped(self.config, tokens, anchor)


class ReinforcePpBaseline(GroupAlgorithm[ReinforcePpBaselineConfig]):
    def advantages(self, samples: Samples) -> Tensor:
        """Relative to the group, whitened over the tokens of the step."""
        mask = self._needed(samples.mask, "mask") & samples.valid[:, None].bool()
        return whitened(super().advantages(samples)[:, None].expand(mask.shape), mask)

    def token_loss(self, tokens: Tokens, anchor: Tensor) -> TokenLoss:
        return _clipped(self.config, tokens, anchor)
