"""Rows of a chunk: what cannot be trained is found whether rows are checked together or one by one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from relax.queue.v1 import queue_pb2
from relax_common.recipe.algorithms import GrpoConfig
from relax_queue.client import Column, LoadedChunk, PlannedChunk, PlannedMicrobatch, RowKey, keys_of, ragged
from trainer_server.algorithms import make_algorithm
from trainer_server.packing.rows import RowLimits, TrainRow
from trainer_server.step.advantages import advantages_of
from trainer_server.step.batch import ChunkRows, chunk_rows

KEYS: list[RowKey] = [("g0", 0, 0), ("g1", 0, 0), ("g0", 1, 0), ("g0", 1, 1), ("g1", 1, 0)]
SAMPLES = list(dict.fromkeys(key[:2] for key in KEYS))
LENGTHS = [4, 3, 5, 2, 6]
LIMITS = RowLimits(vocab_size=10, max_tokens=6)
ALGORITHM = make_algorithm(GrpoConfig(aggregation="seq_mean_token_mean"))
PLAN = queue_pb2.PlanKey(step=0)


def loaded(columns: Mapping[str, list[np.ndarray]], temperature: Sequence[float], chunk: PlannedChunk) -> LoadedChunk:
    """Columns over KEYS as the loader hands them out."""
    own = {name: ragged("row", values) for name, values in columns.items()}
    own["temperature"] = Column("sample", np.array(temperature, np.float32))
    shared = {
        "reward": Column("sample", np.array([1, 0, 0, 1], np.float32)),
        "reward_status": Column("sample", np.zeros(4, np.uint8)),
    }
    keys = keys_of(KEYS)
    return LoadedChunk(PLAN, chunk, keys, own, keys, shared)


def fine() -> dict[str, list[np.ndarray]]:
    return {
        "tokens": [np.arange(n, dtype=np.int32) for n in LENGTHS],
        "loss_mask": [np.array([0] + [1] * (n - 1), np.uint8) for n in LENGTHS],
        "log_probs": [np.full(n, -0.5, np.float32) for n in LENGTHS],
        "versions": [np.full(n, 7, np.int64) for n in LENGTHS],
    }


def chunk() -> PlannedChunk:
    batches = (PlannedMicrobatch(keys_of(KEYS[:3]), 12), PlannedMicrobatch(keys_of(KEYS[3:]), 8))
    return PlannedChunk(0, ("g0", "g1"), (batches,))


def rows_of(read: LoadedChunk) -> ChunkRows:
    return chunk_rows(read, 0, ALGORITHM, LIMITS, advantages_of(ALGORITHM, [read]))


def advantage(row: TrainRow) -> float:
    (value,) = set(row.advantages.tolist())
    assert len(row.advantages) == len(row.tokens)
    return float(value)


def test_rows_keep_their_order_and_a_sample_shares_its_weight_over_its_rows() -> None:
    read = rows_of(loaded(fine(), [1.0] * 4, chunk()))
    rows = [row for batch in read.micro_batches for row in batch]
    assert [(row.key.group, row.key.sample, row.key.segment) for row in rows] == KEYS
    assert [row.weight for row in rows] == [1 / 3, 1 / 2, 1 / 5, 1 / 5, 1 / 5]
    assert advantage(rows[0]) == advantage(rows[4]) > 0 > advantage(rows[1]) == advantage(rows[2]) == advantage(rows[3])
    assert (read.refused_tokens, read.refused_samples, read.reward_sum, read.reward_count) == (0, 0, 2.0, 4)
    assert all(
        row.loss_mask.dtype == np.bool_ and len(row.loss_mask) == n for row, n in zip(rows, LENGTHS, strict=True)
    )


def test_I2_tokens_older_than_the_plan_says_leave_the_loss_mask() -> None:
    columns = fine()
    lineage_2 = 2 << 32
    columns["versions"] = [np.array([-1] + [lineage_2 + v for v in range(5, 4 + n)], np.int64) for n in LENGTHS]
    plan = replace(chunk(), oldest_trained=(7, 0))
    read = rows_of(loaded(columns, [1.0] * 4, plan))
    rows = {(r.key.group, r.key.sample, r.key.segment): r for batch in read.micro_batches for r in batch}
    assert rows["g0", 0, 0].loss_mask.tolist() == [False, False, False, True]
    assert rows["g0", 1, 0].loss_mask.tolist() == [False, False, False, True, True]
    assert rows["g1", 1, 0].loss_mask.tolist() == [False] + [True] * 5, "another group of the chunk keeps its tokens"
    assert rows["g0", 1, 0].weight == 1 / 2, "weights are those of what is left"
    assert (read.refused_tokens, read.refused_samples) == (0, 0)


def damage(columns: dict[str, list[np.ndarray]], temperature: list[float], flaw: str) -> None:
    match flaw:
        case "outside":
            columns["tokens"][3][1] = 10
        case "negative":
            columns["tokens"][3][0] = -1
        case "first":
            columns["loss_mask"][3][0] = 1
        case "infinite":
            columns["log_probs"][3][1] = -np.inf
        case "short":
            columns["log_probs"][3] = columns["log_probs"][3][:1]
        case "long":
            for name, values in columns.items():
                columns[name][3] = np.concatenate([values[3][:1], np.repeat(values[3][1:], 6)])
        case "temperature":
            temperature[SAMPLES.index(("g0", 1))] = 0.0


@pytest.mark.parametrize("flaw", ["outside", "negative", "first", "infinite", "short", "long"])
def test_one_bad_row_is_refused_alone_and_leaves_the_denominators(flaw: str) -> None:
    columns, temperature = fine(), [1.0] * 4
    damage(columns, temperature, flaw)
    read = rows_of(loaded(columns, temperature, chunk()))
    rows = [row for batch in read.micro_batches for row in batch]
    assert [(row.key.group, row.key.sample, row.key.segment) for row in rows] == KEYS[:3] + KEYS[4:]
    assert rows[2].weight == 1 / 4  # the other row of its sample is all that is left of it
    assert read.refused_tokens == int(np.count_nonzero(columns["loss_mask"][3]))
    assert read.refused_samples == 0


def test_a_sample_with_a_temperature_of_zero_is_refused_whole() -> None:
    temperature = [1.0] * 4
    damage({}, temperature, "temperature")
    read = rows_of(loaded(fine(), temperature, chunk()))
    assert (read.refused_tokens, read.refused_samples) == (5, 1)


def test_a_log_prob_that_is_not_finite_outside_the_mask_is_no_flaw() -> None:
    columns = fine()
    columns["log_probs"][3][0] = np.nan
    read = rows_of(loaded(columns, [1.0] * 4, chunk()))
    assert read.refused_tokens == 0


def test_an_empty_response_changes_no_weight_and_trains_no_token() -> None:
    columns = fine()
    columns["loss_mask"][0][:] = 0  # the whole row is prompt
    read = rows_of(loaded(columns, [1.0] * 4, chunk()))
    rows = [row for batch in read.micro_batches for row in batch]
    assert [row.weight for row in rows] == [0.0, 1 / 2, 1 / 5, 1 / 5, 1 / 5]
    assert advantage(rows[0]) > 0, "its reward counts in the baseline"
    assert (read.refused_tokens, read.refused_samples) == (0, 0)
