"""The samples of a pack as spans of its tokens: what a sequence-level loss sums over.

A sample may have several rows (segments). They lie one after another in a pack, and a plan keeps them in one pack.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """`lengths` [samples]: how many of the pack's tokens belong to each sample, in order."""

    lengths: Tensor

    @staticmethod
    def of(lengths: list[int]) -> Sequences:
        return Sequences(torch.tensor(lengths))

    def sum(self, values: Tensor, mask: Tensor) -> Tensor:
        """values [tokens] -> [samples], over the tokens with mask 1; others cannot leak in, not even NaN."""
        kept = torch.where(mask, values, torch.zeros_like(values))
        # Unlike index_add this is deterministic on a GPU too.
        return torch.segment_reduce(kept, "sum", lengths=self.lengths, initial=0)

    def count(self, mask: Tensor) -> Tensor:
        """mask [tokens] -> tokens with mask 1, [samples]."""
        return self.sum(mask.float(), mask)

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """As `sum`, divided by the number of tokens with mask 1; 0 for a sample without one."""
        return self.sum(values, mask) / self.count(mask).clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """values [samples] -> [tokens], to each token its sample's."""
        return values.repeat_interleave(self.lengths)
