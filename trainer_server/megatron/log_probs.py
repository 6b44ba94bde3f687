"""Log-probs of given tokens from logits whose vocabulary is split over the tensor-parallel ranks.

Megatron's own vocab_parallel_cross_entropy writes into the logits it is given and knows neither temperature
nor entropy, hence one function that does all three on a copy.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's rows of the vocabulary; ids from `true_size` on are padding and never get probability."""

    group: dist.ProcessGroup
    start: int
    true_size: int


def token_log_probs(
    logits: Tensor, targets: Tensor, temperatures: Tensor, shard: VocabularyShard
) -> tuple[Tensor, Tensor]:
    """(log_softmax(logits / temperature)[target], entropy of that distribution), both [T] fp32.

    logits [T, rows of this shard], targets [T] int64 ids of the whole vocabulary, temperatures [T] > 0.
    """
    log_probs, entropy = _TokenLogProbs.apply(logits, targets, temperatures, shard)  # type: ignore[no-untyped-call]
    return log_probs, entropy


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperatures: Tensor, shard: VocabularyShard
    ) -> tuple[Tensor, Tensor]:
        scaled = logits.float() / temperatures[:, None]
        padding = shard.start + scaled.size(1) - shard.true_size
        if padding > 0:
            scaled[:, max(scaled.size(1) - padding, 0) :] = float("-inf")
        top = scaled.amax(dim=1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=shard.group)
        scaled -= top[:, None]

        local = targets - shard.start
        here = (local >= 0) & (local < scaled.size(1))
        index = torch.where(here, local, torch.zeros_like(local))[:, None]
        target_logit = torch.where(here, scaled.gather(1, index)[:, 0], scaled.new_zeros(()))

        weights = scaled.exp()
        # 0 * -inf is NaN, so padding is set to 0: it adds nothing to the entropy. In place, because a pack's logits are
        # the largest tensors of all.
        weighted = scaled.masked_fill_(weights == 0, 0.0).mul_(weights).sum(dim=1)
        sums = torch.stack([weights.sum(dim=1), weighted, target_logit])
        dist.all_reduce(sums, group=shard.group)
        total, weighted, target_logit = sums.unbind(0)
        log_total = total.log()

        weights /= total[:, None]
        entropy = log_total - weighted / total
        ctx.save_for_backward(weights, index, here, temperatures, entropy)
        ctx.logits_dtype = logits.dtype
        ctx.set_materialize_grads(False)
        return target_logit - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        """d log p_t / d logit_j = (1[j = t] - p_j) / T; d H / d logit_j = -p_j (log p_j + H) / T."""
        probabilities, index, here, temperatures, entropy = ctx.saved_tensors
        of_log_prob, of_entropy = grads
        scale = (torch.zeros_like(entropy) if of_log_prob is None else of_log_prob) / temperatures
        grad = probabilities * -scale[:, None]
        grad.scatter_add_(1, index, torch.where(here, scale, torch.zeros_like(scale))[:, None])
        if of_entropy is not None:
            surprise = torch.where(probabilities > 0, probabilities.log(), torch.zeros_like(probabilities))
            grad -= probabilities * (surprise + entropy[:, None]) * (of_entropy / temperatures)[:, None]
        return grad.to(ctx.logits_dtype), None, None, None
