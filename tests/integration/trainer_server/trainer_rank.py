"""One rank of the multi-process trainer tests: trains two steps on recorded rows and writes what it saw."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from trainer_steps import counts_of, grpo_loss, recorded_rows, state_bytes, train_step

from trainer_server.megatron.forward import target_logits
from trainer_server.megatron.optimizer import AdamWOptions, main_shards
from trainer_server.megatron.parallel import Parallel, process_groups
from trainer_server.megatron.schedule import LearningRate
from trainer_server.megatron.state import state_from_bytes
from trainer_server.megatron.trainer import NonFiniteUpdates, Trainer
from trainer_server.model.load import read_name_map
from trainer_server.packing.pack import pack_rows
from trainer_server.packing.rows import TrainRow
from trainer_server.publish.export import export_folder, full_tensors


class Gradients:
    """The last update's gradients, put together over data-parallel ranks, under the parameters' names."""

    def __init__(self, trainer: Trainer) -> None:
        names = {p: n for n, p in trainer.module.named_parameters()}
        self._full = {n: torch.zeros(p.shape) for n, p in trainer.module.named_parameters()}
        for shard in main_shards(trainer.optimizer):
            self._full[names[shard.parameter]].view(-1)[shard.start : shard.stop] = shard.main.grad
        from megatron.core import parallel_state  # importable only after trainer_server.megatron

        experts = parallel_state.get_expert_data_parallel_group()
        for name, gradient in self._full.items():
            dist.all_reduce(gradient, group=experts if trainer.names.is_of_expert(name) else trainer.data_group)

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(self._full.items())


def on_policy_step(trainer: Trainer, rows: list[TrainRow]) -> dict[str, float]:
    """Measurements on rows whose log-probs come from the weights that are trained."""
    fresh = [replace(row, log_probs=values) for row, values in zip(rows, trainer.outputs(rows), strict=True)]
    trainer.begin_step()
    dp = trainer.parallel
    trainer.accumulate([fresh[dp.dp_rank :: dp.data_parallel]], version=0, micro_batch_count=1)
    trainer.finish_update(counts_of(fresh))
    measured = trainer.statistics().as_metrics()
    return {name: measured[name] for name in ("ratio_max", "logprob_abs_diff_max", "tokens_of_current_version")}


def poisoned_steps(trainer: Trainer, rows: list[TrainRow]) -> dict[str, object]:
    """An advantage that is not finite: the update is skipped, and the third skipped update in a row ends the run."""
    before = [p.detach().clone() for p in trainer.module.parameters()]
    infinite = [replace(row, advantages=np.full(len(row.tokens), np.inf, np.float32)) for row in rows]
    poisoned = [other if row.key.sample == 1 else row for row, other in zip(rows, infinite, strict=True)]
    said = ""
    try:
        for _ in range(3):
            train_step(trainer, poisoned, len(rows), 4)
    except NonFiniteUpdates as error:
        said = str(error)
    unchanged = all(torch.equal(a, b) for a, b in zip(before, trainer.module.parameters(), strict=True))
    return {"unchanged_by_poison": unchanged, "poison_says": said}


def full_logits(trainer: Trainer, rows: list[TrainRow]) -> torch.Tensor:
    """At all positions of the rows except their last ones."""
    with torch.no_grad():
        local = target_logits(trainer.model, pack_rows(rows, trainer.device, predict="all"))
    group = trainer.tensor_group
    parts = [torch.empty_like(local) for _ in range(trainer.parallel.tensor_parallel)]
    dist.all_gather(parts, local, group=group)
    return torch.cat(parts, dim=1)[:, : trainer.names.shape.vocab_size]


def run(args: argparse.Namespace, parallel: Parallel) -> None:
    names = read_name_map(args.model)
    options = AdamWOptions(LearningRate(1e-3), weight_decay=0.1, clip_norm=1e9)
    trainer = Trainer(parallel, names, grpo_loss(), options, dtype=getattr(torch, args.dtype))
    trainer.reset(args.model)
    groups = trainer.copy_groups
    result: dict[str, object] = {"parameters": sum(p.numel() for p in trainer.module.parameters())}

    def export(name: str) -> None:
        if parallel.copy == 0:
            export_folder(names, trainer.module, parallel.place, groups, args.model, args.out / name, 60_000)

    export("export-initial")
    decayed = {id(p) for group in trainer.optimizer.param_groups if group["wd_mult"] for p in group["params"]}
    result["decayed_norms"] = sum(
        shard.parameter.dim() == 1 for shard in main_shards(trainer.optimizer) if id(shard.main) in decayed
    )
    first, second = (recorded_rows(names.shape.vocab_size, seed) for seed in (1, 3))
    result["loss"] = train_step(trainer, first, args.chunk_rows, args.micro_batch_rows)
    gradients = dict(full_tensors(names, Gradients(trainer), parallel.place, groups))

    saved = state_bytes(trainer, {"version": 1})
    result["loss_second"] = train_step(trainer, second, args.chunk_rows, args.micro_batch_rows)
    after = state_bytes(trainer, {"version": 2})
    result["labels"] = state_from_bytes(trainer, saved)
    result["restored_equal"] = state_bytes(trainer, {"version": 1}) == saved
    result["loss_replayed"] = train_step(trainer, second, args.chunk_rows, args.micro_batch_rows)
    result["replayed_equal"] = state_bytes(trainer, {"version": 2}) == after
    export("export-trained")
    logits = full_logits(trainer, second)
    log_probs = trainer.outputs(second)
    result |= on_policy_step(trainer, second)
    result |= poisoned_steps(trainer, second)
    if parallel.rank == 0:
        seen = {
            "gradients": gradients,
            "logits": logits,
            "log_probs": [torch.from_numpy(values) for values in log_probs],
            "tokens": [torch.from_numpy(row.tokens).long() for row in second],
            "temperatures": [row.temperature for row in second],
        }
        torch.save(seen, args.out / "tensors.pt")
    (args.out / f"rank{parallel.rank}.json").write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("rank", "world-size", "tensor-parallel", "expert-parallel", "port", "chunk-rows", "micro-batch-rows"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("model", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parallel = Parallel(args.rank, args.world_size, args.tensor_parallel, args.expert_parallel)
    store = dist.TCPStore("127.0.0.1", args.port, args.world_size, is_master=args.rank == 0)
    with process_groups(parallel, store, "actor-term1", timeout_seconds=60):
        run(args, parallel)


if __name__ == "__main__":
    main()
