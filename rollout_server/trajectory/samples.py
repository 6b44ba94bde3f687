"""Scored samples as the rows of their group, and the group's verdict. Pure functions on numpy arrays."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from relax.queue.v1 import queue_pb2
from relax_common.rows import RewardStatus
from relax_common.versions import NOT_SAMPLED
from relax_queue.client import Column, decode, ragged
from rollout_server.engines.contract import Completion
from rollout_server.rewards.outcome import RewardOutcome

S = TypeVar("S", bound=np.generic)


@dataclass(frozen=True)
class Scored:
    """What a sample contributes to its group's verdict."""

    reward: float
    status: RewardStatus


@dataclass(frozen=True)
class SampleRows:
    """The finished samples of one group, one segment each, one after another in flat arrays.

    tokens, loss_mask, log_probs, versions: [tokens of all rows], each row's prompt first, then its response;
    row i lies at offsets[i] to offsets[i + 1]. samples, temperatures, rewards, statuses: [rows].
    n_sampled: tokens with loss_mask 1.
    loss_mask is 1 exactly on sampled tokens (a sampled end token included), from lengths and never from token ids;
    elsewhere log_probs is 0 and versions is -1. An empty response has no token with loss_mask 1: its reward counts in
    its group's baseline, and it gives no gradient.
    """

    samples: tuple[int, ...]
    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    log_probs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    temperatures: npt.NDArray[np.float32]
    rewards: npt.NDArray[np.float32]
    statuses: npt.NDArray[np.uint8]
    n_sampled: int
    reward_parts: npt.NDArray[np.float32] | None = None
    """[rows, parts], if the algorithm asks for them"""

    def __len__(self) -> int:
        return len(self.samples)

    def scored(self) -> list[Scored]:
        return scored(self.rewards, self.statuses)


class GroupVerdict(StrEnum):
    OK = "ok"
    NO_SIGNAL = "no_signal"
    FAILED = "failed"


def make_rows(
    samples: Sequence[int],
    prompt_ids: Sequence[int],
    completions: Sequence[Completion],
    temperature: float,
    outcomes: Sequence[RewardOutcome],
    parts: Sequence[str] = (),
) -> SampleRows:
    """A row for each sample, from its completion of the one prompt and its outcome. `parts`: names of the parts of the
    reward whose values are wanted; a part that abstains is NaN."""
    prompt, responses = len(prompt_ids), [len(each.token_ids) for each in completions]
    sizes = [size for response in responses for size in (prompt, response)]
    return SampleRows(
        samples=tuple(samples),
        tokens=_before_each(np.array(prompt_ids, np.int32), [each.token_ids for each in completions]),
        loss_mask=np.repeat(np.array([0, 1] * len(completions), np.uint8), sizes),
        log_probs=_before_each(np.zeros(prompt, np.float32), [each.log_probs for each in completions]),
        versions=_before_each(np.full(prompt, NOT_SAMPLED, np.int64), [each.versions for each in completions]),
        offsets=np.array([0, *itertools.accumulate(prompt + response for response in responses)], np.int64),
        temperatures=np.full(len(completions), temperature, np.float32),
        rewards=np.array([each.value if each.status is RewardStatus.OK else 0.0 for each in outcomes], np.float32),
        statuses=np.array([each.status for each in outcomes], np.uint8),
        n_sampled=sum(responses),
        reward_parts=np.array(
            [[each.parts.get(name, math.nan) for name in parts] for each in outcomes], np.float32
        ).reshape(len(outcomes), len(parts))
        if parts
        else None,
    )


def no_rows() -> SampleRows:
    return make_rows([], [], [], 1.0, [])


def scored(rewards: npt.NDArray[np.generic], statuses: npt.NDArray[np.generic]) -> list[Scored]:
    """Both as the columns store them: kept samples are read back from columns and must compare equal to new ones."""
    return [
        Scored(reward, RewardStatus(status)) for reward, status in zip(rewards.tolist(), statuses.tolist(), strict=True)
    ]


def _before_each(first: npt.NDArray[S], parts: Sequence[npt.NDArray[S]]) -> npt.NDArray[S]:
    """first, parts[0], first, parts[1], ...; empty without parts."""
    return np.concatenate([each for part in parts for each in (first, part)] or [first[:0]])


def judge_group(
    samples: Sequence[Scored], min_valid_samples: int, drops_equal_rewards: bool = True
) -> tuple[GroupVerdict, str]:
    """Verdict and, where it is not OK, one line why. Only valid samples count; equality of rewards is exact, and it is
    no reason to drop a group if the algorithm does not compare its samples."""
    valid = [each.reward for each in samples if each.status is RewardStatus.OK]
    if len(valid) < min_valid_samples:
        bad = sorted({each.status.name.lower() for each in samples if each.status is not RewardStatus.OK})
        return GroupVerdict.FAILED, f"{len(valid)} of {len(samples)} rewards are valid ({', '.join(bad)})"
    if drops_equal_rewards and len(set(valid)) == 1:
        return GroupVerdict.NO_SIGNAL, f"all {len(valid)} valid rewards are {valid[0]:g}"
    return GroupVerdict.OK, ""


def row_columns(rows: SampleRows) -> dict[str, Column]:
    """One column per field of `relax_queue.client.ROW_FIELDS`, without copies; empty without rows."""
    if not rows:
        return {}
    columns = {
        "tokens": Column("row", rows.tokens, rows.offsets),
        "loss_mask": Column("row", rows.loss_mask, rows.offsets),
        "log_probs": Column("row", rows.log_probs, rows.offsets),
        "versions": Column("row", rows.versions, rows.offsets),
        "temperature": Column("sample", rows.temperatures),
        "reward": Column("sample", rows.rewards),
        "reward_status": Column("sample", rows.statuses),
    }
    if rows.reward_parts is not None:
        columns["reward_parts"] = ragged("sample", list(rows.reward_parts))
    return columns


def kept_scores(kept: queue_pb2.KeptSamples) -> dict[int, Scored]:
    """Scores of the samples that an earlier lease left complete, by sample; the queue holds their rows."""
    if not kept.rows:
        return {}
    columns = decode(kept.block)
    samples = dict.fromkeys(row.sample for row in kept.rows)
    scores = scored(columns["reward"].values, columns["reward_status"].values)
    return dict(zip(samples, scores, strict=True))
