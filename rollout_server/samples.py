"""Scored samples as rows, and what they make of their group. Pure functions on numpy arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from relax_common.versions import NOT_SAMPLED
from rollout_server.engines.base import Completion
from rollout_server.rewards.outcome import RewardOutcome, RewardStatus


@dataclass(frozen=True)
class Scored:
    """What a sample contributes to its group's verdict."""

    reward: float
    status: RewardStatus


@dataclass(frozen=True)
class SampleRow:
    """One sample of one segment. The four arrays have one entry a token, prompt first, then response.

    loss_mask is 1 exactly on sampled tokens (a sampled end token included), from lengths and never from token ids;
    elsewhere log_probs is 0 and versions is -1. An empty response has no token with loss_mask 1: its reward counts in
    its group's baseline, and it gives no gradient.
    """

    sample: int
    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    log_probs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]
    temperature: float
    reward: float
    reward_status: RewardStatus

    @property
    def scored(self) -> Scored:
        return Scored(self.reward, self.reward_status)


class GroupVerdict(StrEnum):
    OK = "ok"
    NO_SIGNAL = "no_signal"
    FAILED = "failed"


def make_row(
    sample: int, prompt_ids: Sequence[int], completion: Completion, temperature: float, outcome: RewardOutcome
) -> SampleRow:
    prompt, response = len(prompt_ids), len(completion.token_ids)
    return SampleRow(
        sample=sample,
        tokens=np.concatenate([np.asarray(prompt_ids, np.int32), completion.token_ids]),
        loss_mask=np.repeat(np.array([0, 1], np.uint8), [prompt, response]),
        log_probs=np.concatenate([np.zeros(prompt, np.float32), completion.log_probs]),
        versions=np.concatenate([np.full(prompt, NOT_SAMPLED, np.int64), completion.versions]),
        temperature=temperature,
        # As the column stores it: kept samples come back from there and must compare equal.
        reward=float(np.float32(outcome.value)) if outcome.status is RewardStatus.OK else 0.0,
        reward_status=outcome.status,
    )


def judge_group(samples: Sequence[Scored], min_valid_samples: int) -> tuple[GroupVerdict, str]:
    """Verdict and, where it is not OK, one line why. Only valid samples count; equality of rewards is exact."""
    valid = [each.reward for each in samples if each.status is RewardStatus.OK]
    if len(valid) < min_valid_samples:
        bad = sorted({each.status.name.lower() for each in samples if each.status is not RewardStatus.OK})
        return GroupVerdict.FAILED, f"{len(valid)} of {len(samples)} rewards are valid ({', '.join(bad)})"
    if len(set(valid)) == 1:
        return GroupVerdict.NO_SIGNAL, f"all {len(valid)} valid rewards are {valid[0]:g}"
    return GroupVerdict.OK, ""
