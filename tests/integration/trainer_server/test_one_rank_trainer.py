"""One rank in this process: which types bfloat16 training computes, keeps and publishes; experts; recomputation."""

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import save_endless_qwen3, save_qwen3_moe
from torch._C._distributed_c10d import HashStore
from trainer_steps import counts_of, grpo_loss, recorded_rows, state_bytes, train_step

from dcs.client import FULL, SliceData
from relax.dcs.v1 import dcs_pb2
from relax_common.recipe import Recipe
from relax_common.rows import RowKey
from relax_common.torch_tensors import as_tensor
from relax_common.versions import PolicyVersion
from relaxd.plan.memory import activation_bytes, actor_rank_bytes
from relaxd.plan.model import model_sizes, read_model_config
from rollout_server.engines.contract import PauseMode, Probe, StagedWeights, Tolerance
from rollout_server.engines.torch.engine import TorchEngine
from trainer_server.megatron.optimizer import AdamWOptions, main_shards
from trainer_server.megatron.parallel import Parallel, process_groups
from trainer_server.megatron.schedule import LearningRate
from trainer_server.megatron.state import state_from_bytes
from trainer_server.megatron.trainer import Trainer
from trainer_server.model.load import read_name_map
from trainer_server.packing.rows import TrainRow, plain_row
from trainer_server.publish.export import export_folder
from trainer_server.publish.publisher import Publisher
from trainer_server.rank_group import RankGroup
from trainer_server.status import RoleStatus

ONE = Parallel(0, 1, 1)
# A weight of 0.1 to 0.2 has steps of 0.001 in bfloat16; half of one is rounded away.
TINY_RATE = 2e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_endless_qwen3(made)
    return made


@pytest.fixture(scope="module")
def folder_of_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("experts")
    save_qwen3_moe(made)
    return made


@pytest.fixture(scope="module")
def groups() -> Iterator[None]:
    with process_groups(ONE, HashStore(), "bf16", timeout_seconds=30):
        yield


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[TrainRow]:
    return recorded_rows(read_name_map(folder).shape.vocab_size, seed=1)


def make_trainer(folder: Path, rate: float, dtype: torch.dtype = torch.bfloat16, recompute: bool = False) -> Trainer:
    options = AdamWOptions(LearningRate(rate), clip_norm=1e9)
    trainer = Trainer(ONE, read_name_map(folder), grpo_loss(), options, dtype=dtype, recompute=recompute)
    trainer.reset(folder)
    return trainer


def mains(trainer: Trainer) -> list[torch.Tensor]:
    return [shard.main.detach().clone() for shard in main_shards(trainer.optimizer)]


@pytest.fixture
def trainer(groups: None, folder: Path) -> Trainer:
    return make_trainer(folder, 1e-3)


def test_a_step_computes_in_bf16_and_keeps_weights_moments_and_gradients_in_fp32(
    trainer: Trainer, rows: list[TrainRow], folder: Path
) -> None:
    before = mains(trainer)
    loss = train_step(trainer, rows, len(rows), 4)
    assert {p.dtype for p in trainer.module.parameters()} == {torch.bfloat16}
    kept = [t for s in main_shards(trainer.optimizer) for t in (s.main, s.main.grad, *s.adam.values())]
    assert {tensor.dtype for tensor in kept} == {torch.float32}
    assert {p.main_grad.dtype for p in trainer.module.parameters()} == {torch.float32}
    assert not any(torch.equal(a, b) for a, b in zip(before, mains(trainer), strict=True))
    # The same step in fp32: bfloat16 keeps 8 bits of every activation.
    assert loss == pytest.approx(train_step(make_trainer(folder, 1e-3, torch.float32), rows, 12, 4), rel=0.02)


def test_updates_below_the_resolution_of_bf16_add_up(groups: None, folder: Path, rows: list[TrainRow]) -> None:
    trainer = make_trainer(folder, TINY_RATE)
    weight = trainer.module.get_parameter("decoder.layers.0.mlp.linear_fc1.weight")
    coarse = weight.detach().abs() > 0.125  # steps of 2**-10 and more
    start = weight.detach().clone()
    train_step(trainer, rows, len(rows), 4)
    assert torch.equal(weight[coarse], start[coarse])  # each update is far too small to be seen
    for _ in range(59):
        train_step(trainer, rows, len(rows), 4)
    assert float((weight[coarse] != start[coarse]).float().mean()) > 0.5


def test_recovery_state_keeps_fp32_weights_and_replays_bitwise(trainer: Trainer, rows: list[TrainRow]) -> None:
    train_step(trainer, rows, len(rows), 4)
    saved, fine = state_bytes(trainer, {"version": 1}), mains(trainer)
    assert not all(torch.equal(main, main.bfloat16().float()) for main in fine)
    train_step(trainer, rows, len(rows), 4)
    after = state_bytes(trainer, {"version": 2})
    state_from_bytes(trainer, saved)
    assert all(torch.equal(a, b) for a, b in zip(fine, mains(trainer), strict=True))
    train_step(trainer, rows, len(rows), 4)
    assert state_bytes(trainer, {"version": 2}) == after


@dataclass
class Received:
    """What a publisher sends to dcs."""

    slices: list[SliceData] = field(default_factory=list)

    def begin(self, role: str, version: PolicyVersion, term: int) -> int:
        return 1

    def push(self, version: PolicyVersion, attempt: int, term: int, slices: list[SliceData]) -> None:
        self.slices += slices

    def commit(self, record: dcs_pb2.CommitRecord) -> dcs_pb2.CommitRecord:
        return record


def published(trainer: Trainer) -> dict[str, torch.Tensor]:
    received = Received()
    context = SimpleNamespace(
        dcs=received, group=RankGroup(0, 1, 30.0), status=RoleStatus(), recipe=SimpleNamespace(snapshot_every=1)
    )
    Publisher(context, trainer).commit(  # type: ignore[arg-type]
        PolicyVersion(0, 0), lambda attempt: dcs_pb2.CommitRecord(attempt=attempt)
    )
    pulled = [(entry.to_proto(), bytearray(entry.data)) for entry in received.slices]
    return {name: as_tensor(whole) for name, whole in FULL.decode(pulled).items()}


def test_I6_published_bf16_tensors_serve_in_a_bf16_engine(
    trainer: Trainer, rows: list[TrainRow], folder: Path, tmp_path: Path
) -> None:
    """Parity of bfloat16 is that of its logits: here 0.005 on average and 0.05 at most."""
    train_step(trainer, rows, len(rows), 4)
    tensors = published(trainer)
    out = tmp_path / "export"
    export_folder(trainer.names, trainer.module, trainer.parallel.place, trainer.copy_groups, folder, out)
    exported = load_file(out / "model.safetensors")
    assert exported.keys() == tensors.keys()
    assert all(t.dtype is torch.bfloat16 and torch.equal(t, tensors[name]) for name, t in exported.items())
    assert '"dtype": "bfloat16"' in (out / "config.json").read_text()
    mean, largest = differences_of_engine(trainer, tensors, rows, folder, torch.bfloat16)
    assert mean < 0.005
    assert 0 < largest < 0.05


def test_I6_published_experts_serve_in_the_embedded_engine(
    groups: None, folder_of_experts: Path, rows: list[TrainRow]
) -> None:
    trainer = make_trainer(folder_of_experts, 1e-3, torch.float32)
    train_step(trainer, rows, len(rows), 4)
    tensors = published(trainer)
    assert sum(".experts." in name for name in tensors) == 2 * 4 * 3
    mean, largest = differences_of_engine(trainer, tensors, rows, folder_of_experts, torch.float32)
    assert mean < 1e-5
    assert largest < 1e-4


def differences_of_engine(
    trainer: Trainer, tensors: dict[str, torch.Tensor], rows: list[TrainRow], folder: Path, dtype: torch.dtype
) -> tuple[float, float]:
    """Mean and largest difference of the engine's log-probs to the actor's, with the published tensors in it."""
    sequences = [row.tokens.tolist() for row in rows]
    ours = [values[1:] for values in trainer.outputs([plain_row(row.tokens) for row in rows])]
    engine = TorchEngine(folder, 0, dtype)
    try:
        probe = Probe(sequences, ours, 1.0, Tolerance(1.0, 1.0))
        report = engine.swap(StagedWeights(0, tensors, probe), PauseMode.RETRACT).result(30)
        scored = engine.score(sequences, 1.0).result(30)
    finally:
        engine.close()
    return float(np.abs(np.concatenate(scored) - np.concatenate(ours)).mean()), report.probe_max_difference


def recipe_of(folder: Path, dtype: str, recompute: str) -> Recipe:
    values = {"name": "r", "total_steps": 1, "prompts_per_step": 1, "samples_per_prompt": 2, "data": {"path": "d"}}
    model, actor = {"path": folder, "dtype": dtype}, {"recompute": recompute}
    return Recipe.model_validate({**values, "model": model, "actor": actor})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_plan_knows_the_bytes_of_weights_gradients_and_optimizer(
    groups: None, folder_of_experts: Path, dtype: str
) -> None:
    trainer = make_trainer(folder_of_experts, 1e-3, getattr(torch, dtype))
    parameters, shards = list(trainer.module.parameters()), list(main_shards(trainer.optimizer))
    planned = actor_rank_bytes(
        recipe_of(folder_of_experts, dtype, "none"), model_sizes(read_model_config(folder_of_experts))
    )
    assert planned.parameters == sum(parameter.nbytes for parameter in parameters)
    assert planned.gradients == sum(parameter.main_grad.nbytes for parameter in parameters)
    moments = sum(shard.adam[name].nbytes for shard in shards for name in ("exp_avg", "exp_avg_sq"))
    own = [shard.main for shard in shards if shard.main.data_ptr() not in {p.data_ptr() for p in parameters}]
    assert planned.optimizer == moments + sum(main.nbytes for main in own)


class KeptBytes:
    """Peak bytes kept for the backward pass, without weights; memory that is kept twice counts once."""

    def __init__(self, trainer: Trainer) -> None:
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in trainer.module.parameters()}
        self._times: Counter[int] = Counter()
        self.now = self.most = 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept, memory = tensor.detach(), tensor.untyped_storage()
            if memory.data_ptr() not in self._weights:
                self._count(memory.data_ptr(), memory.nbytes(), 1)
                weakref.finalize(kept, self._count, memory.data_ptr(), memory.nbytes(), -1)
            return kept

        return torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept)

    def _count(self, memory: int, size: int, change: int) -> None:
        before, self._times[memory] = self._times[memory], self._times[memory] + change
        self.now += size * ((self._times[memory] > 0) - (before > 0))
        self.most = max(self.most, self.now)


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_recomputed_layers_give_the_same_step_from_fewer_kept_bytes_as_planned(
    groups: None, folder: Path, folder_of_experts: Path, rows: list[TrainRow], kind: str
) -> None:
    """The plan's estimate is within a quarter of what is kept."""
    source = folder if kind == "dense" else folder_of_experts
    losses, states, kept = [], [], []
    model = model_sizes(read_model_config(source))
    for recompute in (False, True):
        trainer = make_trainer(source, 1e-3, torch.float32, recompute)
        counted = KeptBytes(trainer)
        with counted.hooks():
            losses.append(train_step(trainer, rows, len(rows), 4))
        states.append(state_bytes(trainer, {}))
        kept.append(counted.most)
        recipe = recipe_of(source, "float32", "full" if recompute else "none")
        longest = max(sum(len(row.tokens) for row in rows[first : first + 4]) for first in range(0, len(rows), 4))
        estimate = activation_bytes(recipe, model, longest)
        assert 0.8 < counted.most / estimate < 1.25
    assert losses[0] == losses[1]
    assert states[0] == states[1]
    assert kept[1] < 0.6 * kept[0]


def test_the_quick_starts_model_has_no_row_with_a_huge_gradient(groups: None, quickstart_material: Path) -> None:
    """A row of zeros under RMSNorm has slope 1000: once the pad id is sampled, its gradient would be the whole norm."""
    folder = quickstart_material / "quickstart/made/model"
    random = np.random.default_rng(0)
    size = read_name_map(folder).shape.vocab_size
    rows = []
    for number in range(8):
        tokens = np.array([*random.integers(1, size, 4), 0, *random.integers(1, size, 2)], np.int32)
        mask = np.arange(len(tokens)) >= 4
        plain = plain_row(tokens, key=RowKey("g", number, 0))
        advantages = np.full(len(tokens), (-1.0) ** number, np.float32)
        rows.append(replace(plain, loss_mask=mask, versions=np.where(mask, 0, -1), advantages=advantages))
    trainer = make_trainer(folder, 1e-3, torch.float32)
    found = trainer.outputs(rows)
    fresh = [replace(row, log_probs=values) for row, values in zip(rows, found, strict=True)]
    trainer.begin_step()
    trainer.accumulate([fresh], version=0, micro_batch_count=1)
    report = trainer.finish_update(counts_of(fresh))
    assert 0 < report.grad_norm < 20
