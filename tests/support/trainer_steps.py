"""Recorded rows, and a trainer's step on them."""

from collections.abc import Mapping

import numpy as np

from relax_common.recipe.algorithms import GrpoConfig
from relax_common.rows import RowKey
from trainer_server.algorithms import make_algorithm
from trainer_server.maths.aggregation import StepCounts
from trainer_server.megatron.state import state_parts
from trainer_server.megatron.trainer import Trainer
from trainer_server.packing.rows import TrainRow
from trainer_server.step.loss import PolicyLoss

ROWS = 12


def grpo_loss() -> PolicyLoss:
    return PolicyLoss(make_algorithm(GrpoConfig()))


def recorded_rows(vocab_size: int, seed: int) -> list[TrainRow]:
    """Three groups, each with a prompt of its own."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, vocab_size, random.integers(1, 9)) for _ in range(ROWS // 4)]
    rows = []
    for i in range(ROWS):
        prompt = prompts[i // 4]
        answer = random.integers(0, vocab_size, random.integers(1, 20))
        mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
        rows.append(
            TrainRow(
                key=RowKey(f"g{i // 4}", i % 4, 0),
                tokens=np.concatenate([prompt, answer]).astype(np.int32),
                loss_mask=mask,
                log_probs=np.where(mask, random.normal(-4.5, 0.3, len(mask)), 0).astype(np.float32),
                versions=np.where(mask, 0, -1),
                temperature=float(random.choice([0.7, 1.0, 1.3])),
                advantages=np.full(len(mask), random.normal(), np.float32),
            )
        )
    return rows


def counts_of(rows: list[TrainRow]) -> StepCounts:
    return StepCounts(sum(int(row.loss_mask.sum()) for row in rows), len(rows))


def train_step(trainer: Trainer, rows: list[TrainRow], chunk_rows: int, micro_batch_rows: int) -> float:
    trainer.begin_step()
    p = trainer.parallel
    for start in range(0, len(rows), chunk_rows):
        chunk = rows[start : start + chunk_rows]
        parts = [
            [part[i : i + micro_batch_rows] for i in range(0, len(part), micro_batch_rows)]
            for part in (chunk[dp :: p.data_parallel] for dp in range(p.data_parallel))
        ]
        trainer.accumulate(parts[p.dp_rank], version=0, micro_batch_count=max(map(len, parts)))
    return trainer.finish_update(counts_of(rows)).loss


def state_bytes(trainer: Trainer, labels: Mapping[str, int]) -> bytes:
    return b"".join(state_parts(trainer, labels))
