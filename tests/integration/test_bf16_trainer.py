"""The actor in bfloat16, one process: what it computes in, what it keeps in fp32, what it publishes and exports."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from tiny_models import save_endless_qwen3
from torch._C._distributed_c10d import HashStore
from trainer_steps import recorded_rows, train_step

from dcs.client import SliceData
from relax.dcs.v1 import dcs_pb2
from relax_common.versions import PolicyVersion
from rollout_server.engines.base import PauseMode, Probe, StagedWeights
from rollout_server.engines.torch_engine import TorchEngine
from rollout_server.weights import SliceSpec, assemble
from trainer_server.algorithms.spec import AlgorithmSpec
from trainer_server.backend.optimizer import AdamWOptions, main_shards
from trainer_server.backend.parallel import Parallel, process_groups
from trainer_server.backend.rows import TrainRow, plain_row
from trainer_server.backend.schedule import LearningRate
from trainer_server.backend.state import state_from_bytes, state_to_bytes
from trainer_server.backend.trainer import Trainer
from trainer_server.model.export import export_folder
from trainer_server.model.load import read_name_map
from trainer_server.publisher import Publisher
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
def groups() -> Iterator[None]:
    with process_groups(ONE, HashStore(), "bf16", timeout_seconds=30):
        yield


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[TrainRow]:
    return recorded_rows(read_name_map(folder).shape.vocab_size, seed=1)


def make_trainer(folder: Path, rate: float, dtype: torch.dtype = torch.bfloat16) -> Trainer:
    options = AdamWOptions(LearningRate(rate), clip_norm=1e9)
    trainer = Trainer(ONE, read_name_map(folder), AlgorithmSpec("grpo"), options, dtype=dtype)
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
    saved, fine = state_to_bytes(trainer, {"version": 1}), mains(trainer)
    assert not all(torch.equal(main, main.bfloat16().float()) for main in fine)
    train_step(trainer, rows, len(rows), 4)
    after = state_to_bytes(trainer, {"version": 2})
    state_from_bytes(trainer, saved)
    assert all(torch.equal(a, b) for a, b in zip(fine, mains(trainer), strict=True))
    train_step(trainer, rows, len(rows), 4)
    assert state_to_bytes(trainer, {"version": 2}) == after


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
    Publisher(received, RankGroup(0, 1, 30.0), trainer, RoleStatus(), 1).commit(  # type: ignore[arg-type]
        PolicyVersion(0, 0), lambda attempt: dcs_pb2.CommitRecord(attempt=attempt)
    )
    specs = [
        SliceSpec(e.name, e.full_shape, e.start, e.extent, e.dtype, xxhash.xxh3_64_intdigest(e.data), len(e.data))
        for e in received.slices
    ]
    assert {spec.dtype for spec in specs} == {"BF16"}
    return assemble((spec, bytes(entry.data)) for spec, entry in zip(specs, received.slices, strict=True))


def test_I6_published_bf16_tensors_serve_in_a_bf16_engine(
    trainer: Trainer, rows: list[TrainRow], folder: Path, tmp_path: Path
) -> None:
    """Parity of bfloat16 is that of its logits: here 0.005 on average and 0.05 at most."""
    train_step(trainer, rows, len(rows), 4)
    tensors = published(trainer)
    out = tmp_path / "export"
    export_folder(trainer.names, trainer.module, trainer.parallel.tp, trainer.tensor_group, folder, out)
    exported = load_file(out / "model.safetensors")
    assert exported.keys() == tensors.keys()
    assert all(t.dtype is torch.bfloat16 and torch.equal(t, tensors[name]) for name, t in exported.items())
    assert '"dtype": "bfloat16"' in (out / "config.json").read_text()

    sequences = [row.tokens.tolist() for row in rows]
    ours = trainer.log_probs([plain_row(row.tokens) for row in rows])
    probe = Probe(sequences, [values[1:] for values in ours], 1.0, tolerance=0.05)
    engine = TorchEngine(folder, 0, torch.bfloat16)
    try:
        report = engine.swap(StagedWeights(0, tensors, probe), PauseMode.RETRACT).result(30)
        scored = engine.score(sequences, 1.0).result(30)
    finally:
        engine.close()
    assert 0 < report.probe_max_difference < 0.05
    differences = [abs(a - b[1:]).mean() for a, b in zip(scored, ours, strict=True)]
    assert sum(differences) / len(differences) < 0.005
