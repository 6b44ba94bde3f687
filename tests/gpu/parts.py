"""The parts of the check, one per process: `python parts.py group|actor|engine --folder DIR --sglang-python PYTHON`.

The actor's part leaves what it exports and its log-probs in the folder for the engine's part. The last line on standard
output says what was seen.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch._C._distributed_c10d import HashStore
from trainer_steps import grpo_loss
from transformers import Qwen3Config, Qwen3ForCausalLM

from relax_common.rows import RowKey
from rollout_server.assignment import PROBE_TOLERANCE
from rollout_server.engines.contract import GenerateRequest, PauseMode, Probe, SamplingParams, StagedWeights
from rollout_server.engines.sglang.engine import SglangEngine
from rollout_server.engines.sglang.managed import ManagedBackend, ManagedSettings
from trainer_server.maths.aggregation import StepCounts
from trainer_server.megatron import cpu as megatron_cpu
from trainer_server.megatron.optimizer import AdamWOptions, main_shards
from trainer_server.megatron.parallel import Parallel, process_groups
from trainer_server.megatron.schedule import LearningRate
from trainer_server.megatron.state import state_from_bytes, state_parts
from trainer_server.megatron.trainer import Trainer
from trainer_server.model.load import read_name_map
from trainer_server.packing.rows import TrainRow, plain_row
from trainer_server.publish.export import export_folder
from trainer_server.rank_group import RankGroup

ONE = Parallel(0, 1, 1)
VOCABULARY = 512
ROWS, ROW_TOKENS = 8, 24
START_SECONDS, CALL_SECONDS = 200.0, 60.0
CPU_KV_TOKENS = 4096


def group(args: argparse.Namespace) -> str:
    """One rank, set up by our own code, with the NCCL group and the group that carries messages."""
    with process_groups(ONE, HashStore(), "check", timeout_seconds=30):
        device = torch.device(torch.cuda.current_device())
        summed = torch.arange(4, device=device)
        dist.all_reduce(summed)
        if summed.tolist() != [0, 1, 2, 3] or RankGroup(0, 1, 30.0).total(2.0) != 2.0:
            raise SystemExit("a sum over one rank is another number")
        return f"{dist.get_backend()} on {device}"


def actor(args: argparse.Namespace) -> str:
    """Two steps in bfloat16; saves and restores the state, computes log-probs, writes an export."""
    model = _save_model(args.folder / "model")
    with process_groups(ONE, HashStore(), "check", timeout_seconds=60):
        options = AdamWOptions(LearningRate(1e-3))
        names = read_name_map(model)
        trainer = Trainer(ONE, names, grpo_loss(), options, dtype=torch.bfloat16, recompute=True)
        trainer.reset(model)
        if megatron_cpu.prepare() is torch.cuda.is_available():
            raise SystemExit("the stand-ins for machines without CUDA are in the wrong place")
        before = [shard.main.detach().clone() for shard in main_shards(trainer.optimizer)]
        loss = _step(trainer)
        unmoved = sum(torch.equal(a, b.main) for a, b in zip(before, main_shards(trainer.optimizer), strict=True))
        if not math.isfinite(loss) or unmoved:
            raise SystemExit(f"loss {loss}, {unmoved} of {len(before)} parameters have not moved")
        saved = b"".join(state_parts(trainer, {}))
        _step(trainer)
        state_from_bytes(trainer, saved)
        if b"".join(state_parts(trainer, {})) != saved:
            raise SystemExit("a restored state is another one")
        rows = [plain_row(row.tokens) for row in _rows()]
        probe = [
            {"tokens": row.tokens.tolist(), "log_probs": values[1:].tolist()}
            for row, values in zip(rows, trainer.outputs(rows), strict=True)
        ]
        (args.folder / "probe.json").write_text(json.dumps(probe))
        export_folder(names, trainer.module, ONE.place, trainer.copy_groups, model, args.folder / "export")
        parameter = next(trainer.module.parameters())
        return f"{parameter.dtype} on {parameter.device}, loss {loss:.4f}, state of {len(saved)} bytes"


def engine(args: argparse.Namespace) -> str:
    """SGLang starts without weights, takes the actor's, agrees with it on the probe, generates."""
    model = args.folder / "model"
    settings = ManagedSettings(
        model_dir=model,
        architecture="Qwen3ForCausalLM",
        dtype="bfloat16",
        seed=0,
        python=args.sglang_python,
        log_path=args.folder / "engine.log",
        samples_in_flight_max=ROWS,
        kv_tokens=CPU_KV_TOKENS,
        exact_versions=True,
        silence_seconds=60.0,
        options={"mem_fraction_static": 0.3},
    )
    lines = json.loads((args.folder / "probe.json").read_text())
    log_probs = [np.array(line["log_probs"], np.float32) for line in lines]
    probe = Probe([line["tokens"] for line in lines], log_probs, 1.0, PROBE_TOLERANCE["bfloat16"])
    tensors = load_file(args.folder / "export" / "model.safetensors")
    sglang = SglangEngine(model, ManagedBackend(settings))
    try:
        sglang.ready().result(START_SECONDS)
        report = sglang.swap(StagedWeights(1, tensors, probe), PauseMode.RETRACT).result(CALL_SECONDS)
        request = GenerateRequest("check", [3, 4, 5], ROWS, SamplingParams(1.0, 16))
        completions = sglang.generate(request).result(CALL_SECONDS)
        detail = sglang.health().detail
    finally:
        sglang.close()
    sampled = np.concatenate([each.log_probs for each in completions])
    if not (np.isfinite(sampled).all() and all((each.versions == 1).all() for each in completions)):
        raise SystemExit(f"log-probs or versions of what was generated are wrong: {completions[0]}")
    return f"{detail.partition(', pid')[0]}, probe within {report.probe_max_difference:.3f}, {len(sampled)} tokens"


def _save_model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,  # GPU kernels take no smaller ones
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=2,
        bos_token_id=None,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def _rows() -> list[TrainRow]:
    random = np.random.default_rng(0)
    mask = np.arange(ROW_TOKENS) >= 4
    return [
        TrainRow(
            key=RowKey("check", sample, 0),
            tokens=random.integers(3, VOCABULARY, ROW_TOKENS).astype(np.int32),
            loss_mask=mask,
            log_probs=np.where(mask, -6.2, 0).astype(np.float32),
            versions=np.where(mask, 0, -1),
            temperature=1.0,
            advantages=np.full(ROW_TOKENS, random.normal(), np.float32),
        )
        for sample in range(ROWS)
    ]


def _step(trainer: Trainer) -> float:
    rows = _rows()
    trainer.begin_step()
    trainer.accumulate([rows[: ROWS // 2], rows[ROWS // 2 :]], version=0, micro_batch_count=2)
    return trainer.finish_update(StepCounts(sum(int(row.loss_mask.sum()) for row in rows), ROWS)).loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("group", "actor", "engine"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--sglang-python", default="")
    args = parser.parse_args()
    print({"group": group, "actor": actor, "engine": engine}[args.part](args))


if __name__ == "__main__":
    main()
