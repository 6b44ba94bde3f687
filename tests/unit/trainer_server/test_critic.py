"""The critic's loss, its rows, and the model it is: values in place of logits."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Qwen3Config

from dcs.client import Head
from dcs.client.values import Ancestry
from relax.dcs.v1 import dcs_pb2
from relax.queue.v1 import queue_pb2
from relax_common.errors import RowsFreed
from relax_common.recipe.algorithms import PpoConfig
from relax_common.rows import RowKey
from relax_common.versions import PolicyVersion
from relax_queue.client import Column, LoadedChunk, PlannedChunk, PlannedMicrobatch, keys_of, ragged
from trainer_server.algorithms import Samples
from trainer_server.algorithms.ppo import Ppo
from trainer_server.maths.aggregation import StepCounts
from trainer_server.maths.returns import whitened
from trainer_server.megatron.optimizer import AdamWOptions
from trainer_server.megatron.parallel import Parallel, process_groups
from trainer_server.megatron.schedule import LearningRate
from trainer_server.megatron.trainer import Trainer
from trainer_server.model.load import read_name_map
from trainer_server.model.value_head import with_value_head
from trainer_server.packing.rows import plain_row
from trainer_server.publish.export import export_folder
from trainer_server.roles.critic import Critic
from trainer_server.step.critic_rows import critic_rows
from trainer_server.step.value_loss import ValueLoss, clipped_value_loss

SAMPLES = Samples(
    ["g", "g"],
    tensor([1.0, 0.0]),
    tensor([True, True]),
    mask=tensor([[True, True, False, True, False], [False, True, True, True, False]]),
    values=tensor([[0.5, 0.4, 7.0, 0.2, -3.0], [9.0, 0.1, 0.3, 0.2, 0.0]]),
)


def test_advantages_and_returns_on_vectors() -> None:
    ppo = Ppo(PpoConfig(gamma=0.9, gae_lambda=0.8, whiten_advantages=False))
    torch.testing.assert_close(ppo.advantages(SAMPLES)[0], tensor([0.11632, 0.356, 0, 0.8, 0]), atol=2e-6, rtol=0)
    torch.testing.assert_close(ppo.returns(SAMPLES)[0], tensor([0.61632, 0.756, 0, 1.0, 0]), atol=2e-6, rtol=0)
    white = Ppo(PpoConfig(gamma=0.9, gae_lambda=0.8)).advantages(SAMPLES)
    assert SAMPLES.mask is not None
    torch.testing.assert_close(white, whitened(ppo.advantages(SAMPLES), SAMPLES.mask))


def test_I11_a_sample_without_a_valid_reward_has_no_advantage_and_no_return() -> None:
    broken = Samples(**{**vars(SAMPLES), "valid": tensor([True, False]), "rewards": tensor([1.0, float("nan")])})
    ppo = Ppo(PpoConfig())
    assert not ppo.advantages(broken)[1].any()
    assert not ppo.returns(broken)[1].any()
    assert torch.isfinite(ppo.advantages(broken)).all()


def mean_loss(parts: list[tuple[list[float], list[float]]]) -> float:
    """(values, returns) of each micro-batch -> the loss of the step."""
    total, tokens = torch.zeros(()), 0
    for values, returns in parts:
        v, r = tensor(values), tensor(returns)
        total += clipped_value_loss(v, v, r, torch.ones(len(v)).bool(), 0.2)[0].sum()
        tokens += len(values)
    return float(total) / ValueLoss(0.2).divisor(StepCounts(tokens, len(parts)))


@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[0], [1, 2, 3]], [[0], [1], [2], [3]]])
def test_the_loss_is_one_mean_over_tokens_in_every_split(split: list[list[int]]) -> None:
    errors = [2.0, 1.0, 1.0, 1.0]
    assert mean_loss([([errors[i] for i in part], [0.0] * len(part)) for part in split]) == pytest.approx(0.875)


def test_values_and_returns_of_different_shape_are_refused() -> None:
    mask = torch.ones(2, 1).bool()
    with pytest.raises(ValueError, match="differ in shape"):
        clipped_value_loss(tensor([0.0, 1.0]), tensor([0.0, 1.0]), tensor([[0.0], [1.0]]), mask, 0.2)


def test_where_the_clip_decides() -> None:
    loss, clipped = clipped_value_loss(
        tensor([0.5, 0.1]), torch.zeros(2), tensor([1.0, 1.0]), torch.ones(2).bool(), 0.2
    )
    assert clipped.tolist() == [True, False]
    torch.testing.assert_close(loss, tensor([0.5 * 0.8**2, 0.5 * 0.9**2]))


def test_a_masked_token_reaches_neither_loss_nor_gradient() -> None:
    values = tensor([0.5, float("nan")], requires_grad=True)
    mask = tensor([True, False])
    loss, _ = clipped_value_loss(values, tensor([0.0, float("inf")]), tensor([1.0, float("nan")]), mask, 0.2)
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad[1] == 0
    assert torch.isfinite(values.grad).all()


def test_rows_carry_the_values_that_were_written_and_the_returns_of_their_sample() -> None:
    keys = keys_of([("g", 0, 0), ("g", 0, 1), ("g", 1, 0)])
    lengths = [3, 2, 3]
    shared = {
        "tokens": ragged("row", [np.arange(n, dtype=np.int32) for n in lengths]),
        "loss_mask": ragged("row", [np.array([0] + [1] * (n - 1), np.uint8) for n in lengths]),
        "versions": ragged("row", [np.zeros(n, np.int64) for n in lengths]),
        "values": ragged("row", [np.full(n, 0.25, np.float32) for n in lengths]),
        "temperature": Column("sample", np.ones(2, np.float32)),
        "reward": Column("sample", np.array([1, 0], np.float32)),
        "reward_status": Column("sample", np.array([0, 2], np.uint8)),
    }
    chunk = PlannedChunk(0, ("g",), ((PlannedMicrobatch(keys, 8),),))
    loaded = LoadedChunk(queue_pb2.PlanKey(step=0), chunk, keys, {}, keys, shared)
    ((first, second, invalid),) = critic_rows(Ppo(PpoConfig(gamma=0.5)), [loaded])
    assert first.returns is not None and second.returns is not None and first.values is not None  # noqa: PT018
    assert first.returns.tolist() == [0, 0.25, 0.5], "the reward is earned at the last token of the last row"
    assert second.returns.tolist() == [0, 1.0]
    assert first.values.tolist() == [0.25] * 3
    assert not invalid.loss_mask.any()


@pytest.fixture(scope="module")
def groups() -> Iterator[Parallel]:
    parallel = Parallel(0, 1, 1)
    with process_groups(parallel, dist.HashStore(), "critic", timeout_seconds=60):
        yield parallel


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_models_folder_becomes_a_critic_that_transformers_reads_back(
    groups: Parallel, tmp_path: Path, tied: bool
) -> None:
    config = Qwen3Config(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    names = with_value_head(read_name_map(tmp_path / "model"))
    trainer = Trainer(groups, names, ValueLoss(0.2), AdamWOptions(LearningRate(1e-3)))
    trainer.reset(tmp_path / "model")
    ids = np.array([3, 7, 1, 30, 2], np.int32)
    assert not trainer.outputs([plain_row(ids, key=RowKey("g", 0, 0))])[0].any(), "the first values are 0"
    with torch.no_grad():
        trainer.module.output_layer.weight.normal_()
        trainer.module.output_layer.bias.fill_(0.5)
    found = trainer.outputs([plain_row(ids, key=RowKey("g", 0, 0))])[0]
    export_folder(names, trainer.module, groups.place, trainer.copy_groups, tmp_path / "model", tmp_path / "out")
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "out")
    assert model.config.num_labels == 1
    with torch.no_grad():
        expected: Tensor = model(torch.from_numpy(ids).long()[None]).logits[0, :, 0]
    np.testing.assert_allclose(found[1:], expected[:-1].numpy(), atol=1e-5)
    trainer.reset(tmp_path / "out")
    np.testing.assert_allclose(trainer.outputs([plain_row(ids, key=RowKey("g", 0, 0))])[0], found, atol=1e-6)
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert "lm_head.weight" not in tensors
    save_file({**tensors, "surprise": torch.zeros(1)}, tmp_path / "out/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="surprise"):
        trainer.reset(tmp_path / "out")


def test_a_critic_whose_rows_are_gone_reports_the_head_lost_and_goes_on_after_the_rollback() -> None:
    """Parts of the real role around a step that cannot be trained again; dcs and relaxd are stand-ins."""
    head = Head(PolicyVersion(0, 3), 0, PolicyVersion(0, 1), True, True, dcs_pb2.CommitRecord(), 9, Ancestry([], None))
    reports: list[str] = []
    steps = iter([RowsFreed("step 1 is freed"), False])

    class Stepping(Critic):
        def __init__(self) -> None:
            self._head = lambda: head
            self._group = SimpleNamespace(share=lambda make: make())
            self._reporter = SimpleNamespace(report=lambda lost, reason: reports.append(f"{lost}: {reason}") or b"")
            self.recovered = 0

        def _one_step(self) -> bool:
            outcome = next(steps)
            if isinstance(outcome, RowsFreed):
                raise outcome
            return outcome

        def _recover(self) -> None:
            self.recovered += 1

        def _export(self, folder: Path) -> None:
            assert folder == Path("out")

    critic = Stepping()
    critic.run(Path("out"))
    assert reports == ["0.3: step 1 is freed"]
    assert critic.recovered == 2
