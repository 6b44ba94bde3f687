"""Advantages of samples from the rewards of their group.

Groups are told apart by id, never by position. Samples that are not valid, or whose reward is not finite, are ignored:
they change no statistic and get advantage 0. Rewards that are all exactly equal, and a group of one, carry no signal:
advantage 0.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from relax_common.recipe.algorithm import Normalizer

_STD_FLOOR = 1e-6


def group_advantages(name: Normalizer, rewards: Tensor, group_ids: Sequence[str], valid: Tensor) -> Tensor:
    """rewards [samples] fp32, valid [samples] bool -> advantages [samples] fp32."""
    if not len(rewards) == len(group_ids) == len(valid):
        raise ValueError(f"{len(rewards)} rewards, {len(group_ids)} group ids and {len(valid)} validity flags")
    rewards = rewards.float()
    usable = valid.bool() & torch.isfinite(rewards)
    members: dict[str, list[int]] = {}
    for index, (group_id, counts) in enumerate(zip(group_ids, usable.tolist(), strict=True)):
        if counts:
            members.setdefault(group_id, []).append(index)
    advantages = torch.zeros_like(rewards)
    if members:
        order = torch.tensor([index for indices in members.values() for index in indices])
        ends = np.cumsum([len(indices) for indices in members.values()])
        groups = torch.tensor_split(rewards[order], ends[:-1].tolist())
        advantages[order] = torch.cat([_of_one_group(name, group) for group in groups])
    return advantages


def _of_one_group(name: Normalizer, rewards: Tensor) -> Tensor:
    n = len(rewards)
    if n == 1 or bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    mean = rewards.mean()
    centred = rewards - mean
    if name == "maxrl":
        return centred / mean if mean > 0 else torch.zeros_like(rewards)
    if name == "group_mean_std":
        return centred / (rewards.std(correction=1) + _STD_FLOOR)
    if name == "leave_one_out":
        return centred * (n / (n - 1))
    return centred
