"""PPO: advantages from a critic's values (Schulman et al. 2016, 2017)."""

from torch import Tensor

from relax_common.recipe.algorithms import PpoConfig
from trainer_server.algorithms.base import Algorithm, Samples, Tokens
from trainer_server.maths.policy_loss import TokenLoss, masked, ppo_clip
from trainer_server.maths.returns import generalized_advantages, last_token_rewards, whitened


class Ppo(Algorithm[PpoConfig]):
    def advantages(self, samples: Samples) -> Tensor:
        """[samples, tokens]; whitened over the trained tokens of the step if the section says so."""
        mask = self._judged(samples)
        advantages, _ = self._estimates(samples)
        return whitened(advantages, mask) if self.config.whiten_advantages else advantages

    def returns(self, samples: Samples) -> Tensor:
        """What the critic is trained towards, [samples, tokens]."""
        return self._estimates(samples)[1]

    def _estimates(self, samples: Samples) -> tuple[Tensor, Tensor]:
        """The reward stands at the last trained token, the KL at each. An answer that was cut off ends there too: what
        it could still have earned is not estimated."""
        mask = self._judged(samples)
        rewards = last_token_rewards(samples.rewards.float(), mask)
        penalty = self.reward_penalty(samples)
        if penalty is not None:
            rewards = rewards - masked(penalty, mask)
        values = masked(self._needed(samples.values, "values"), mask)
        return generalized_advantages(rewards, values, mask, self.config.gamma, self.config.gae_lambda)

    def _judged(self, samples: Samples) -> Tensor:
        """Trained tokens of samples with a valid reward."""
        return self._needed(samples.mask, "mask") & samples.valid[:, None].bool()

    def token_loss(self, tokens: Tokens, anchor: Tensor) -> TokenLoss:
        c = self.config
        return ppo_clip(tokens.policy, anchor, tokens.advantages, tokens.mask, c.eps_low, c.eps_high)
