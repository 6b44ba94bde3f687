"""Advantages of the samples of a chunk, or of all chunks of a step, from the columns that every rank has read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from relax_common.rows import RewardStatus, RowKey
from relax_common.versions import NUMBER_MASK
from relax_queue.client import Column, LoadedChunk, PlannedChunk
from trainer_server.algorithms import AnyAlgorithm, Samples

Sample = tuple[str, int]
"""(group, sample)"""


@dataclass(frozen=True)
class Advantages:
    """`per_sample` holds one number, or one per token of the sample; `starts` where each of its rows begins."""

    per_sample: Mapping[Sample, float | NDArray[np.float32]]
    starts: Mapping[RowKey, int]

    def of_row(self, key: RowKey, tokens: int) -> NDArray[np.float32]:
        """[tokens]"""
        value = self.per_sample[key[:2]]
        if isinstance(value, float):
            return np.full(tokens, value, np.float32)
        start = self.starts[key]
        return value[start : start + tokens]


def advantages_of(algorithm: AnyAlgorithm, chunks: Sequence[LoadedChunk]) -> Advantages:
    """From whole groups."""
    return estimates_of(algorithm.advantages, chunks)


def estimates_of(estimate: Callable[[Samples], torch.Tensor], chunks: Sequence[LoadedChunk]) -> Advantages:
    """What `estimate` gives for the samples of whole groups, [samples] or [samples, tokens]."""
    rewards: dict[Sample, dict[str, float]] = {}
    for loaded in chunks:
        rewards |= sample_values(loaded.everyone, loaded.shared)
    starts: dict[RowKey, int] = {}
    tokens = {name: _by_sample(chunks, name, starts) for name in _TOKEN_FIELDS}
    padded = {field: _padded(tokens[name], list(rewards)) for name, field in _TOKEN_FIELDS.items() if tokens[name]}
    samples = Samples(
        groups=[group for group, _ in rewards],
        rewards=torch.tensor([value["reward"] for value in rewards.values()], dtype=torch.float32),
        valid=torch.tensor([value["reward_status"] == RewardStatus.OK for value in rewards.values()]),
        reward_parts=_parts(chunks, list(rewards)),
        mask=padded["mask"].bool() if "mask" in padded else None,
        anchor=padded.get("anchor"),
        reference=padded.get("reference"),
        values=padded.get("values"),
        teacher=padded.get("teacher"),
    )
    values = estimate(samples)
    per_sample: Sequence[float | NDArray[np.float32]] = values.tolist() if values.dim() == 1 else list(values.numpy())
    return Advantages(dict(zip(rewards, per_sample, strict=True)), starts)


_TOKEN_FIELDS = {
    "loss_mask": "mask",
    "log_probs": "anchor",
    "old_log_probs": "anchor",
    "ref_log_probs": "reference",
    "values": "values",
    "teacher_log_probs": "teacher",
}
"""Fields of rows, by the attribute of `Samples` that they fill. A recipe shares at most one of two for an attribute."""


def sample_values(keys: Sequence[RowKey], columns: Mapping[str, Column]) -> dict[Sample, dict[str, float]]:
    """Sample-scoped values; their units follow the first appearance of each sample."""
    order = dict.fromkeys((group, sample) for group, sample, _ in keys)
    named = [
        (name, column.values.tolist())
        for name, column in columns.items()
        if column.scope == "sample" and column.offsets is None
    ]
    return {sample: {name: float(values[i]) for name, values in named} for i, sample in enumerate(order)}


def fresh_mask(chunk: PlannedChunk, keys: Sequence[RowKey], columns: Mapping[str, Column]) -> Column:
    """The loss mask without tokens that the plan says are too old to be trained (I2)."""
    mask, versions = columns["loss_mask"], columns["versions"]
    if not chunk.oldest_trained or not len(keys) or versions.offsets is None:
        return mask
    oldest = dict(zip(chunk.groups, chunk.oldest_trained, strict=True))
    allowed = np.repeat(np.asarray([oldest[group] for group, _, _ in keys], np.int64), np.diff(versions.offsets))
    fresh = (versions.values.astype(np.int64, copy=False) & NUMBER_MASK) >= allowed
    return replace(mask, values=(mask.values.astype(np.bool_) & fresh).astype(mask.values.dtype))


def _by_sample(
    chunks: Sequence[LoadedChunk], name: str, starts: dict[RowKey, int]
) -> dict[Sample, list[NDArray[np.generic]]]:
    """The arrays of each sample's rows, in order; notes where each row starts in its sample."""
    found: dict[Sample, list[NDArray[np.generic]]] = {}
    for loaded in chunks:
        if name not in loaded.shared:
            continue
        keys, shared = loaded.everyone, loaded.shared
        column = fresh_mask(loaded.chunk, keys, shared) if name == "loss_mask" else shared[name]
        for index, key in enumerate(keys):
            rows = found.setdefault((key[0], key[1]), [])
            starts[RowKey(*key)] = sum(map(len, rows))
            rows.append(column.unit(index))
    return found


def _padded(rows: Mapping[Sample, Sequence[NDArray[np.generic]]], samples: Sequence[Sample]) -> torch.Tensor:
    """[samples, tokens of the longest sample] fp32, padded with 0."""
    whole = [np.concatenate(rows[sample]) for sample in samples]
    result = np.zeros((len(whole), max(map(len, whole))), np.float32)
    for line, values in zip(result, whole, strict=True):
        line[: len(values)] = values
    return torch.from_numpy(result)


def _parts(chunks: Sequence[LoadedChunk], samples: Sequence[Sample]) -> torch.Tensor | None:
    """[samples, parts of the reward]"""
    found: dict[Sample, NDArray[np.generic]] = {}
    for loaded in chunks:
        column = loaded.shared.get("reward_parts")
        if column is not None:
            order = dict.fromkeys((group, sample) for group, sample, _ in loaded.everyone)
            found |= {sample: column.unit(index) for index, sample in enumerate(order)}
    return torch.from_numpy(np.stack([found[sample] for sample in samples]).astype(np.float32)) if found else None
