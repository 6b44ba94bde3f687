"""Rows of a step as a critic trains them: with the values that advantages were computed with, and the returns."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from relax_common.rows import RewardStatus, RowKey
from relax_queue.client import LoadedChunk
from trainer_server.algorithms.ppo import Ppo
from trainer_server.packing.rows import TrainRow, plain_row
from trainer_server.step.advantages import Advantages, estimates_of, fresh_mask, sample_values


def critic_rows(algorithm: Ppo, chunks: Sequence[LoadedChunk]) -> list[tuple[TrainRow, ...]]:
    """Micro-batches as planned, those of all the actor's ranks one after another. A sample without a valid reward has
    no return: its rows are not trained."""
    returns = estimates_of(algorithm.returns, chunks)
    batches: list[tuple[TrainRow, ...]] = []
    for loaded in chunks:
        rows = dict(_rows(loaded, returns))
        planned = (batch.rows for rank in loaded.chunk.ranks for batch in rank)
        batches += [tuple(rows[RowKey(*key)] for key in keys) for keys in planned if keys]
    return batches


def _rows(loaded: LoadedChunk, returns: Advantages) -> Iterator[tuple[RowKey, TrainRow]]:
    keys, columns = loaded.everyone, loaded.shared
    rewards = sample_values(keys, columns)
    mask, values = fresh_mask(loaded.chunk, keys, columns), columns["values"]
    for index, key in enumerate(keys):
        tokens = columns["tokens"].unit(index)
        judged = rewards[key[:2]]["reward_status"] == RewardStatus.OK
        trained: NDArray[np.bool_] = mask.unit(index).astype(np.bool_) & judged
        row = replace(
            plain_row(tokens, rewards[key[:2]]["temperature"], RowKey(*key)),
            loss_mask=trained,
            values=values.unit(index).astype(np.float32),
            returns=returns.of_row(RowKey(*key), len(tokens)),
        )
        yield row.key, row
