"""GDPO: each part of a weighted reward is normalised in its group, so that no part drowns the others."""

import torch
from torch import Tensor

from relax_common.recipe.algorithms import GdpoConfig
from trainer_server.algorithms.base import Samples
from trainer_server.algorithms.grpo import ClippedAlgorithm
from trainer_server.maths.advantages import group_advantages
from trainer_server.maths.returns import whitened


class Gdpo(ClippedAlgorithm[GdpoConfig]):
    def advantages(self, samples: Samples) -> Tensor:
        """The sum of the normalised parts, whitened over the samples of the step: a long sample counts once."""
        parts = self._needed(samples.reward_parts, "parts of the reward").float().unbind(1)
        weights = self.part_weights or (1.0,) * len(parts)
        total = torch.zeros(len(samples.groups))
        for part, weight in zip(parts, weights, strict=True):
            total += weight * group_advantages(self.config.normalizer, part, samples.groups, samples.valid)
        return whitened(total, samples.valid.bool())
