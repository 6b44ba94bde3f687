"""Token rows with the actor's log-probs, by which an engine shows that it serves the right weights (I6)."""

from collections.abc import Sequence

import numpy as np

from relax.dcs.v1 import dcs_pb2
from trainer_server.megatron.trainer import Trainer
from trainer_server.packing.rows import TrainRow, plain_row

_TOKENS_MAX = 64
_FIRST_TOKENS = 16


def probe_of(trainer: Trainer, rows: Sequence[TrainRow]) -> dcs_pb2.Probe:
    """Log-probs of tokens[1:] at temperature 1 under the weights in memory. All ranks must call it; a rank computes
    only if it, or a rank that shares its model, has rows."""
    # At least two tokens, because nothing predicts the first one.
    plain = [plain_row(row.tokens[:_TOKENS_MAX]) for row in rows if len(row.tokens) > 1]
    if not plain and trainer.parallel.expert_parallel == 1:
        return dcs_pb2.Probe()
    log_probs = trainer.outputs(plain)
    return dcs_pb2.Probe(
        rows=[
            dcs_pb2.ProbeRow(tokens=row.tokens.tolist(), log_probs=values[1:].tolist())
            for row, values in zip(plain, log_probs, strict=True)
        ]
    )


def first_probe_rows(trainer: Trainer, count: int, seed: int) -> list[TrainRow]:
    """Probe rows from before anything was sampled: random ids, the same on every rank."""
    shape = trainer.names.shape
    random = np.random.default_rng(seed)
    length = min(_FIRST_TOKENS, shape.max_positions)
    return [plain_row(random.integers(0, shape.vocab_size, length)) for _ in range(count)]
