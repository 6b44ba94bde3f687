"""From token losses to one number, as a sum now and one division later.

Sums can be added over micro-batches, ranks and chunks in any split; the division uses the counts of the
whole step, known only when it has closed. Dividing earlier would make the result depend on the split.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer_server.algorithms.spec import AggregationName, AlgorithmSpec


@dataclass(frozen=True)
class StepCounts:
    """Of the whole closed step: trained tokens, and valid samples with one such token at least."""

    tokens: int
    samples: int


def token_weight(name: AggregationName, tokens_in_sample: int) -> float:
    """What every token of a sample is multiplied with before the sum over tokens."""
    if name == "seq_mean_token_mean":
        return 1.0 / tokens_in_sample if tokens_in_sample else 0.0
    return 1.0


def masked_sum(values: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """Sum over the masked tokens only; what lies outside cannot leak in, NaN included."""
    zero = torch.zeros_like(values)
    return (torch.where(mask, values, zero) * weights).sum()


def denominator(spec: AlgorithmSpec, counts: StepCounts) -> float:
    """What the sum over the whole step is divided by, once."""
    if spec.aggregation == "token_sum":
        return 1.0
    if spec.aggregation == "token_mean":
        return float(counts.tokens)
    if spec.aggregation == "seq_mean_token_sum_norm":
        if spec.norm_constant is None:
            raise ValueError(f"{spec.name}: seq_mean_token_sum_norm needs norm_constant")
        return counts.samples * spec.norm_constant
    return float(counts.samples)
