"""One rank that trains the same recorded step under several algorithms and writes what each update measured."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from trainer_steps import recorded_rows

from relax_common.recipe.algorithms import KINDS, name_of
from trainer_server.algorithms import make_algorithm
from trainer_server.megatron.optimizer import AdamWOptions
from trainer_server.megatron.parallel import Parallel, process_groups
from trainer_server.megatron.schedule import LearningRate
from trainer_server.megatron.trainer import Trainer
from trainer_server.model.load import read_name_map
from trainer_server.step.loss import PolicyLoss
from trainer_server.step.updates import MicroBatches, counts_of, divided, with_selection

SECTIONS: list[dict[str, Any]] = [
    {"name": "gspo", "eps_low": 0.1, "eps_high": 0.1},
    {"name": "gmpo"},
    {"name": "sapo", "entropy_coef": 0.01},
    {"name": "opsm", "aggregation": "seq_mean_token_mean"},
    {"name": "kl_cov", "share": 0.1},
    {"name": "clip_cov", "share": 0.2, "covariance_low": 0.0},
    {"name": "m2po", "second_moment_max": 0.02},
    {"name": "grpo", "updates_per_step": 2},
    {"name": "m2po", "second_moment_max": 0.02, "updates_per_step": 3, "passes_per_step": 2},
    {"name": "grpo", "on_policy": True},
    {"name": "grpo", "on_policy": True, "passes_per_step": 2},
]
"""Sections of a recipe; `on_policy`: the rows carry the log-probs of the weights that train them."""
KIND_OF = {name_of(kind): kind for kind in KINDS}


def batches_of(rows: list[Any], dp_rank: int, ranks: int, size: int) -> MicroBatches:
    mine = rows[dp_rank::ranks]
    return [tuple(mine[i : i + size]) for i in range(0, len(mine), size)]


def trained(trainer: Trainer, section: dict[str, Any], model: Path, size: int) -> list[dict[str, float]]:
    keys = {name: value for name, value in section.items() if name != "on_policy"}
    config = KIND_OF[section["name"]].model_validate(keys)
    algorithm = make_algorithm(config)
    trainer.loss = PolicyLoss(algorithm)
    trainer.reset(model)
    rows = recorded_rows(trainer.names.shape.vocab_size, 1)
    if "on_policy" in section:
        rows = [replace(row, log_probs=values) for row, values in zip(rows, trainer.outputs(rows), strict=True)]
    p = trainer.parallel
    groups = list(dict.fromkeys(row.key.group for row in rows))
    parts = divided(batches_of(rows, p.dp_rank, p.data_parallel, size), groups, config.updates_per_step, 10_000)
    seen = []
    for number, part in enumerate(parts * config.passes_per_step):
        counts, most = counts_of(part, trainer)
        if config.surveys:
            part = with_selection(algorithm, trainer, part, most, seed=number)
        trainer.accumulate(part, 0, most)
        report = trainer.finish_update(counts)
        marked = sum(int(np.count_nonzero(row.selected)) for batch in part for row in batch if row.selected is not None)
        selected = torch.tensor(marked)
        dist.all_reduce(selected, group=trainer.data_group)
        seen.append({"loss": report.loss, "grad_norm": report.grad_norm, "selected": int(selected)})
    metrics = trainer.statistics().as_metrics()
    return [*seen, {name: metrics[name] for name in ("entropy", "ratio_mean", "ratio_max", "clip_fraction_high")}]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("rank", "world-size", "tensor-parallel", "port", "micro-batch-rows"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("model", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    parallel = Parallel(args.rank, args.world_size, args.tensor_parallel)
    store = dist.TCPStore("127.0.0.1", args.port, args.world_size, is_master=args.rank == 0)
    with process_groups(parallel, store, "actor-term1", timeout_seconds=60):
        # With a large epsilon an update is nearly proportional to the gradient, so rounding stays rounding.
        options = AdamWOptions(LearningRate(1e-2), epsilon=0.1, clip_norm=1e9)
        names = read_name_map(args.model)
        trainer = Trainer(parallel, names, PolicyLoss(make_algorithm(KINDS[0]())), options)
        seen = [trained(trainer, section, args.model, args.micro_batch_rows) for section in SECTIONS]
    (args.out / f"rank{args.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
