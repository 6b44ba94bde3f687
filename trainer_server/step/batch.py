"""Rows of a planned chunk from the queue, with the advantages of their samples."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from relax_common.errors import DataLoss
from relax_common.process.telemetry import get_logger
from relax_common.rows import RewardStatus, RowKey
from relax_queue.client import Column, LoadedChunk
from trainer_server.algorithms import AnyAlgorithm
from trainer_server.packing.rows import RowLimits, TrainRow, all_usable, refusal
from trainer_server.step.advantages import Advantages, Sample, fresh_mask, sample_values

ROW_FIELDS = ("tokens", "loss_mask", "log_probs", "versions", "old_log_probs", "ref_log_probs", "teacher_log_probs")
"""Fields per token that a trained row carries."""

Value = TypeVar("Value", bound=np.generic)


@dataclass(frozen=True)
class ChunkRows:
    """This rank's micro-batches, and what all ranks know of the whole chunk's rewards.

    `refused_tokens` and `refused_samples` were planned for this rank but cannot be trained; they leave the
    denominators.
    """

    micro_batches: tuple[tuple[TrainRow, ...], ...]
    micro_batch_count: int
    reward_sum: float
    reward_count: int
    refused_tokens: int
    refused_samples: int


def chunk_rows(
    loaded: LoadedChunk, dp_rank: int, algorithm: AnyAlgorithm, limits: RowLimits, advantages: Advantages
) -> ChunkRows:
    chunk, mine, columns = loaded.chunk, loaded.rows, loaded.columns
    batches = [batch.rows for batch in chunk.ranks[dp_rank]]
    rewards = sample_values(loaded.everyone, loaded.shared)
    if mine:
        columns = {**columns, "loss_mask": fresh_mask(chunk, mine, columns)}
    rows = _train_rows(mine, columns, advantages) if mine else []
    trained = _trained_tokens(columns["loss_mask"]) if mine else []
    kept = _kept(rows, columns, limits) if mine else []
    weighted = _weighted(algorithm, rows, trained, kept)
    counted = [values["reward"] for values in rewards.values() if values["reward_status"] == RewardStatus.OK]
    return ChunkRows(
        micro_batches=tuple(
            part for batch in batches if (part := tuple(weighted[key] for key in batch if key in weighted))
        ),
        micro_batch_count=max(len(rank) for rank in chunk.ranks),
        reward_sum=float(np.sum(counted)),
        reward_count=len(counted),
        refused_tokens=sum(n for n, keep in zip(trained, kept, strict=True) if not keep),
        refused_samples=len(
            _samples_with_tokens(mine, trained) - _samples_with_tokens(compress(mine, kept), compress(trained, kept))
        ),
    )


def _train_rows(keys: Sequence[RowKey], columns: Mapping[str, Column], advantages: Advantages) -> list[TrainRow]:
    temperatures = sample_values(keys, columns)
    nothing: list[NDArray[np.float32] | None] = [None] * len(keys)
    old, reference, teacher = (
        _cut(columns[name], np.float32) if name in columns else nothing
        for name in ("old_log_probs", "ref_log_probs", "teacher_log_probs")
    )
    return [
        TrainRow(
            key=key,
            tokens=tokens,
            loss_mask=loss_mask,
            log_probs=log_probs,
            versions=versions,
            temperature=temperatures[key[:2]]["temperature"],
            advantages=advantages.of_row(key, len(tokens)),
            old_log_probs=old_log_probs,
            ref_log_probs=ref_log_probs,
            teacher_log_probs=teacher_log_probs,
        )
        for key, tokens, loss_mask, log_probs, versions, old_log_probs, ref_log_probs, teacher_log_probs in zip(
            keys,
            _cut(columns["tokens"], np.int32),
            _cut(columns["loss_mask"], np.bool_),
            _cut(columns["log_probs"], np.float32),
            _cut(columns["versions"], np.int64),
            old,
            reference,
            teacher,
            strict=True,
        )
    ]


def _cut(column: Column, dtype: type[Value]) -> list[NDArray[Value]]:
    """One array per row: views of the column where it has this dtype already."""
    values = column.values.astype(dtype, copy=False)
    ends = _offsets(column).tolist()
    return [values[start:end] for start, end in pairwise(ends)]


def _offsets(column: Column) -> NDArray[np.int64]:
    if column.offsets is None:
        raise DataLoss("the queue gave one value a row for a field with one value a token")
    return column.offsets


def _trained_tokens(loss_mask: Column) -> list[int]:
    before = np.concatenate([[0], np.cumsum(loss_mask.values.astype(np.bool_))])
    counts: list[int] = np.diff(before[_offsets(loss_mask)]).tolist()
    return counts


def _kept(rows: Sequence[TrainRow], columns: Mapping[str, Column], limits: RowLimits) -> list[bool]:
    """Which rows can be trained. All rows are checked together first, and one by one only if that check fails."""
    offsets = _offsets(columns["tokens"])
    if all(
        np.array_equal(offsets, _offsets(columns[name])) for name in ("loss_mask", "log_probs", "versions")
    ) and all_usable(
        offsets,
        columns["tokens"].values.astype(np.int32, copy=False),
        columns["loss_mask"].values.astype(np.bool_),
        columns["log_probs"].values.astype(np.float32, copy=False),
        columns["temperature"].values.astype(np.float32, copy=False),
        limits,
    ):
        return [True] * len(rows)
    return [_usable(row, limits) for row in rows]


def _usable(row: TrainRow, limits: RowLimits) -> bool:
    reason = refusal(row, limits)
    if reason is not None:
        get_logger().error("row_refused", row=str(row.key), reason=reason)
    return reason is None


def _weighted(
    algorithm: AnyAlgorithm, rows: Sequence[TrainRow], trained: Sequence[int], kept: Sequence[bool]
) -> dict[RowKey, TrainRow]:
    """The usable rows by key, each with its weight. A weight needs the tokens of the whole sample, and the plan keeps a
    sample's rows on one rank."""
    usable = list(compress(zip(rows, trained, strict=True), kept))
    tokens: dict[Sample, int] = {}
    for row, count in usable:
        sample = (row.key.group, row.key.sample)
        tokens[sample] = tokens.get(sample, 0) + count
    weights = {sample: algorithm.token_weight(count) for sample, count in tokens.items()}
    result = {}
    for row, _ in usable:
        key = row.key
        weight = weights[key.group, key.sample]
        result[key] = row if weight == row.weight else replace(row, weight=weight)
    return result


def _samples_with_tokens(keys: Iterable[RowKey], trained: Iterable[int]) -> set[Sample]:
    return {key[:2] for key, count in zip(keys, trained, strict=True) if count}
