"""A closed step as several optimizer updates: which rows each one trains, and which of their tokens were selected."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from relax_common.rows import RowKey
from trainer_server.algorithms import AnyAlgorithm, Survey
from trainer_server.maths.aggregation import StepCounts
from trainer_server.megatron.trainer import Trainer
from trainer_server.packing.rows import TrainRow

MicroBatches = list[tuple[TrainRow, ...]]


def divided(
    micro_batches: Sequence[Sequence[TrainRow]], groups: Sequence[str], updates: int, tokens_per_microbatch: int
) -> list[MicroBatches]:
    """This rank's micro-batches of each update: the groups of the step, in order, in `updates` parts of nearly equal
    size. What is left of a planned micro-batch joins the one before it as long as both fit the budget."""
    if updates == 1:
        return [[tuple(rows) for rows in micro_batches]]
    part_of = {group: part for part, some in enumerate(np.array_split(np.array(groups), updates)) for group in some}
    return [
        _joined(
            [[row for row in rows if part_of[row.key.group] == part] for rows in micro_batches], tokens_per_microbatch
        )
        for part in range(updates)
    ]


def _joined(parts: Sequence[Sequence[TrainRow]], tokens_max: int) -> MicroBatches:
    joined: list[list[TrainRow]] = []
    size = 0
    for rows in filter(None, parts):
        added = sum(len(row.tokens) for row in rows)
        if joined and size + added <= tokens_max:
            joined[-1] += rows
            size += added
        else:
            joined.append(list(rows))
            size = added
    return [tuple(rows) for rows in joined]


def counts_of(micro_batches: MicroBatches, trainer: Trainer) -> tuple[StepCounts, int]:
    """(trained tokens and samples of the update, the most micro-batches of a rank), over the data-parallel ranks."""
    tokens: dict[tuple[str, int], int] = {}
    for row in (row for rows in micro_batches for row in rows):
        tokens[row.key[:2]] = tokens.get(row.key[:2], 0) + int(np.count_nonzero(row.loss_mask))
    sums = torch.tensor([sum(tokens.values()), sum(map(bool, tokens.values()))], device=trainer.device)
    most = torch.tensor(len(micro_batches), device=trainer.device)
    dist.all_reduce(sums, group=trainer.data_group)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=trainer.data_group)
    return StepCounts(*sums.tolist()), int(most)


def with_selection(
    algorithm: AnyAlgorithm, trainer: Trainer, micro_batches: MicroBatches, micro_batch_count: int, seed: int
) -> MicroBatches:
    """The same rows, each with the tokens that the algorithm has selected over all ranks' rows of the update."""
    mine = list(_surveyed(algorithm, trainer, micro_batches, micro_batch_count))
    everyone: list[list[_Trained]] = [[] for _ in range(trainer.parallel.data_parallel)]
    dist.all_gather_object(everyone, mine, group=trainer.data_group)
    rows = sorted((row for rank in everyone for row in rank), key=lambda row: row[0])
    if not rows:
        return micro_batches
    policy, anchor, advantages = (np.concatenate([row[i] for row in rows]) for i in (1, 2, 3))
    chosen = algorithm.select(Survey(policy, anchor, advantages, seed))
    ends = np.cumsum([len(row[1]) for row in rows])
    selected = dict(zip((row[0] for row in rows), np.split(chosen, ends[:-1]), strict=True))
    return [tuple(_marked(row, selected[row.key]) for row in batch) for batch in micro_batches]


_Trained = tuple[RowKey, NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]
"""A row's key, and policy log-probs, anchor log-probs and advantages of its trained tokens."""


def _surveyed(algorithm: AnyAlgorithm, trainer: Trainer, micro_batches: MicroBatches, count: int) -> Iterator[_Trained]:
    from_rollout = algorithm.config.old_policy == "rollout"
    for index in range(count):
        # Ranks that share a model compute together, so a rank with fewer micro-batches takes part with none.
        rows = micro_batches[index] if index < len(micro_batches) else ()
        for row, log_probs in zip(rows, trainer.outputs(rows), strict=True):
            anchor = row.log_probs if from_rollout else row.old_log_probs
            if anchor is None:
                raise ValueError(f"{algorithm.config.name}: row {row.key} carries no old log-probs")
            yield row.key, log_probs[row.loss_mask], anchor[row.loss_mask], row.advantages[row.loss_mask]


def _marked(row: TrainRow, selected: NDArray[np.bool_]) -> TrainRow:
    marks = np.zeros(len(row.tokens), np.bool_)
    marks[row.loss_mask] = selected
    return replace(row, selected=marks)


def draw_seed(run_seed: int, step: int, update: int) -> int:
    """A seed for what an update draws; the same after a replay."""
    said = f"{run_seed}/{step}/{update}".encode()
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little")
