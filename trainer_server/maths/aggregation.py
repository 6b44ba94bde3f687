"""Aggregates token losses to one number: a sum now and one division later.

Sums can be added over micro-batches, ranks and chunks in any split; the division uses the counts of the
whole step, known only when it has closed. Dividing earlier would make the result depend on the split.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from relax_common.recipe.algorithm import Aggregation


@dataclass(frozen=True)
class StepCounts:
    """Counts of the whole closed step: trained tokens, and valid samples with at least one such token."""

    tokens: int
    samples: int


def token_weight(name: Aggregation, tokens_in_sample: int) -> float:
    """The weight by which every token of a sample is multiplied before the sum over tokens."""
    if name == "seq_mean_token_mean":
        return 1.0 / tokens_in_sample if tokens_in_sample else 0.0
    return 1.0


def masked_sum(values: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """Sum over the tokens with mask 1; values at other tokens cannot leak in, not even NaN."""
    zero = torch.zeros_like(values)
    return (torch.where(mask, values, zero) * weights).sum()


def denominator(name: Aggregation, constant: float, counts: StepCounts) -> float:
    """The number by which the sum over the whole step is divided, once. `constant` is C of seq_mean_token_sum_norm."""
    if name == "token_sum":
        return 1.0
    if name == "token_mean":
        return float(counts.tokens)
    if name == "seq_mean_token_sum_norm":
        return counts.samples * constant
    return float(counts.samples)
