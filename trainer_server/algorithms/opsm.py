"""Off-policy sequence masking: a sample of negative advantage from which the policy has moved away is not trained
(DeepSeek-V3.2, 2025)."""

from dataclasses import replace

from torch import Tensor

from relax_common.recipe.algorithms import OpsmConfig
from trainer_server.algorithms.base import Tokens
from trainer_server.algorithms.grpo import ClippedAlgorithm
from trainer_server.maths.policy_loss import TokenLoss, log_ratio, masked
from trainer_server.maths.sequences import Sequences


def moved_away(
    log_probs: Tensor, anchor: Tensor, advantages: Tensor, mask: Tensor, sequences: Sequences, delta: float
) -> Tensor:
    """[tokens] bool: A < 0 and the sample's mean of log old - log pi above `delta`."""
    distance = sequences.mean(-log_ratio(log_probs, anchor, mask).detach(), mask)
    return mask & (masked(advantages, mask) < 0) & sequences.spread(distance > delta)


class Opsm(ClippedAlgorithm[OpsmConfig]):
    def token_loss(self, tokens: Tokens, anchor: Tensor) -> TokenLoss:
        away = moved_away(
            tokens.policy, anchor, tokens.advantages, tokens.mask, tokens.sequences, self.config.opsm_delta
        )
        result = super().token_loss(tokens, anchor)
        return replace(result, loss=masked(result.loss, ~away), clipped_low=result.clipped_low | away)
