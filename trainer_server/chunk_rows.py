"""Rows of a planned chunk from the queue, with the advantages of their samples."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from relax.queue.v1 import queue_pb2
from relax_common.logs import get_logger
from relax_queue.client import Column, PlannedChunk, QueueClient, RowKey
from trainer_server.algorithms.advantages import group_advantages
from trainer_server.algorithms.aggregation import token_weight
from trainer_server.algorithms.spec import AlgorithmSpec
from trainer_server.backend.rows import RowKey as TrainRowKey
from trainer_server.backend.rows import RowLimits, TrainRow, refusal

_TOKEN_FIELDS = ("tokens", "loss_mask", "log_probs", "versions", "temperature")
_REWARD_FIELDS = ("reward", "reward_status")
REWARD_OK = 0

Sample = tuple[str, int]


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


def read_chunk(
    queue: QueueClient,
    plan: queue_pb2.PlanKey,
    chunk: PlannedChunk,
    dp_rank: int,
    algorithm: AlgorithmSpec,
    limits: RowLimits,
) -> ChunkRows:
    everyone = [key for rank in chunk.ranks for batch in rank for key in batch.rows]
    batches = [batch.rows for batch in chunk.ranks[dp_rank]]
    mine = [key for batch in batches for key in batch]
    if mine == everyone:
        columns = queue.read_rows(plan, everyone, (*_TOKEN_FIELDS, *_REWARD_FIELDS))
        rewards = _samples(everyone, columns)
    else:
        rewards = _samples(everyone, queue.read_rows(plan, everyone, _REWARD_FIELDS))
        columns = queue.read_rows(plan, mine, _TOKEN_FIELDS) if mine else {}
    advantages = _advantages(algorithm, rewards)
    rows = _train_rows(mine, columns, advantages) if mine else {}
    kept = {key: row for key, row in rows.items() if _usable(row, limits)}
    weighted = _weighted(algorithm, kept)
    refused = [row for key, row in rows.items() if key not in kept]
    counted = [values["reward"] for values in rewards.values() if values["reward_status"] == REWARD_OK]
    return ChunkRows(
        micro_batches=tuple(
            part for batch in batches if (part := tuple(weighted[key] for key in batch if key in weighted))
        ),
        micro_batch_count=max(len(rank) for rank in chunk.ranks),
        reward_sum=float(np.sum(counted)),
        reward_count=len(counted),
        refused_tokens=sum(int(np.count_nonzero(row.loss_mask)) for row in refused),
        refused_samples=len(_trained_samples(rows.values()) - _trained_samples(kept.values())),
    )


def _samples(keys: Sequence[RowKey], columns: Mapping[str, Column]) -> dict[Sample, dict[str, float]]:
    """Sample-scoped values; their units follow the first appearance of each sample."""
    order = list(dict.fromkeys((group, sample) for group, sample, _ in keys))
    return {
        sample: {name: float(column.values[i]) for name, column in columns.items() if column.scope == "sample"}
        for i, sample in enumerate(order)
    }


def _advantages(algorithm: AlgorithmSpec, rewards: Mapping[Sample, Mapping[str, float]]) -> dict[Sample, float]:
    values = group_advantages(
        algorithm.advantage,
        torch.tensor([value["reward"] for value in rewards.values()], dtype=torch.float32),
        [group for group, _ in rewards],
        torch.tensor([value["reward_status"] == REWARD_OK for value in rewards.values()]),
    )
    return dict(zip(rewards, values.tolist(), strict=True))


def _train_rows(
    keys: Sequence[RowKey], columns: Mapping[str, Column], advantages: Mapping[Sample, float]
) -> dict[RowKey, TrainRow]:
    temperatures = _samples(keys, columns)
    return {
        key: TrainRow(
            key=TrainRowKey(*key),
            tokens=columns["tokens"].unit(i).astype(np.int32),
            loss_mask=columns["loss_mask"].unit(i).astype(np.bool_),
            log_probs=columns["log_probs"].unit(i).astype(np.float32),
            versions=columns["versions"].unit(i).astype(np.int64),
            temperature=temperatures[key[:2]]["temperature"],
            advantage=advantages[key[:2]],
        )
        for i, key in enumerate(keys)
    }


def _usable(row: TrainRow, limits: RowLimits) -> bool:
    reason = refusal(row, limits)
    if reason is not None:
        get_logger().error("row_refused", row=str(row.key), reason=reason)
    return reason is None


def _weighted(algorithm: AlgorithmSpec, rows: Mapping[RowKey, TrainRow]) -> dict[RowKey, TrainRow]:
    """Weights need the tokens of the whole sample; the plan keeps a sample's rows on one rank."""
    tokens: dict[Sample, int] = {}
    for (group, sample, _), row in rows.items():
        tokens[group, sample] = tokens.get((group, sample), 0) + int(np.count_nonzero(row.loss_mask))
    return {
        key: TrainRow(**{**vars(row), "weight": token_weight(algorithm.aggregation, tokens[key[:2]])})
        for key, row in rows.items()
    }


def _trained_samples(rows: Iterable[TrainRow]) -> set[Sample]:
    return {(row.key.group_id, row.key.sample) for row in rows if row.loss_mask.any()}
