"""On-policy distillation: the reverse KL from a teacher on the policy's own samples (Agarwal et al. 2024)."""

from dataclasses import replace

from torch import Tensor

from relax_common.recipe.algorithms import OpdConfig
from trainer_server.algorithms.base import Samples, Tokens
from trainer_server.algorithms.grpo import ClippedAlgorithm
from trainer_server.maths.kl import kl_per_token
from trainer_server.maths.policy_loss import TokenLoss, log_ratio, masked


def reverse_kl_loss(log_probs: Tensor, teacher: Tensor, anchor: Tensor, mask: Tensor) -> Tensor:
    """[tokens]: the value of k3 and the gradient of KL(pi || teacher) for tokens that the anchor has sampled,
    r d grad log pi with d = log pi - log teacher. The gradient of d itself has mean 0, and that of k3 belongs to the
    other KL."""
    own, other = masked(log_probs, mask), masked(teacher, mask)
    gradient = kl_per_token("k2", own, other)
    weight = log_ratio(log_probs, anchor, mask).exp().detach()
    return masked(kl_per_token("k3", own, other).detach() + weight * (gradient - gradient.detach()), mask)


class Opd(ClippedAlgorithm[OpdConfig]):
    def advantages(self, samples: Samples) -> Tensor:
        """Per sample, or per token where the divergence is part of them: then 0 or the group's advantage, less
        distill_coef (log anchor - log teacher)."""
        relative = super().advantages(samples) * float(self.config.reward_advantages)
        if self.config.distill_as == "loss":
            return relative
        mask = self._needed(samples.mask, "mask")
        anchor, teacher = (
            self._needed(samples.anchor, "old log-probs"),
            self._needed(samples.teacher, "teacher log-probs"),
        )
        divergence = kl_per_token("k1", masked(anchor, mask), masked(teacher, mask))
        return masked(relative[:, None] - self.config.distill_coef * divergence, mask)

    def token_loss(self, tokens: Tokens, anchor: Tensor) -> TokenLoss:
        result = super().token_loss(tokens, anchor)
        if self.config.distill_as == "advantage":
            return result
        teacher = self._needed(tokens.teacher, "teacher log-probs")
        added = reverse_kl_loss(tokens.policy, teacher, anchor, tokens.mask)
        return replace(result, loss=result.loss + self.config.distill_coef * added)
