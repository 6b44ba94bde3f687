"""Advantages of the samples of a chunk."""

from collections.abc import Mapping

import torch

from relax_common.rows import RewardStatus
from trainer_server.algorithms import AnyAlgorithm

Sample = tuple[str, int]
"""(group, sample)"""


def advantages_of(algorithm: AnyAlgorithm, rewards: Mapping[Sample, Mapping[str, float]]) -> dict[Sample, float]:
    """From `reward` and `reward_status` of whole groups."""
    values = algorithm.advantages(
        torch.tensor([value["reward"] for value in rewards.values()], dtype=torch.float32),
        [group for group, _ in rewards],
        torch.tensor([value["reward_status"] == RewardStatus.OK for value in rewards.values()]),
    )
    return dict(zip(rewards, values.tolist(), strict=True))
