"""The trainer on the real megatron-core, one to two processes, against transformers and against itself."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from relaxd.plan.model import model_sizes, read_model_config

# The first test waits for all trainings.
pytestmark = pytest.mark.timeout(900)
WORKER = Path(__file__).with_name("trainer_rank.py")
VOCAB = 97  # odd, so that TP=2 has to pad it


@dataclass(frozen=True)
class Outcome:
    folder: Path
    ranks: list[dict[str, Any]]
    tensors: dict[str, Any]


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.08,
}
FAMILIES = {
    "qwen3": Qwen3Config(head_dim=16, tie_word_embeddings=False, **SIZES),
    "qwen2": Qwen2Config(tie_word_embeddings=False, **SIZES),
    "moe": Qwen3MoeConfig(
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        **SIZES,
    ),
    "llama": LlamaConfig(
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e5}, **SIZES
    ),
}


@pytest.fixture(scope="module")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for family, config in FAMILIES.items():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or "bias" in name:
                    parameter.add_(0.2 * torch.randn_like(parameter))
        folders[family] = tmp_path_factory.mktemp(family)
        model.save_pretrained(folders[family])
    return folders


@pytest.fixture(scope="module")
def model_folder(model_folders: dict[str, Path]) -> Path:
    return model_folders["qwen3"]


def _train(
    model: Path,
    out: Path,
    tensor_parallel: int,
    data_parallel: int,
    chunk: int,
    micro_batch: int,
    expert_parallel: int = 1,
    dtype: str = "float32",
) -> Outcome:
    out.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = tensor_parallel * data_parallel
    options = {
        "world-size": world,
        "tensor-parallel": tensor_parallel,
        "expert-parallel": expert_parallel,
        "port": port,
        "chunk-rows": chunk,
        "micro-batch-rows": micro_batch,
        "dtype": dtype,
        "model": model,
        "out": out,
    }
    common = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    path = os.pathsep.join([str(WORKER.parents[2] / "support"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": path,
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), "--rank", str(rank), *common],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(errors)
    results = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(world)]
    return Outcome(out, results, torch.load(out / "tensors.pt"))


@pytest.fixture(scope="module")
def outcomes(model_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    base = tmp_path_factory.mktemp("out")
    model_folder = model_folders["qwen3"]
    return {
        "one": _train(model_folder, base / "one", 1, 1, chunk=12, micro_batch=12),
        "split": _train(model_folder, base / "split", 1, 1, chunk=8, micro_batch=3),
        "tp2": _train(model_folder, base / "tp2", 2, 1, chunk=8, micro_batch=5),
        "dp2": _train(model_folder, base / "dp2", 1, 2, chunk=5, micro_batch=2),
        # Tied embeddings, no head norms; and biases, which are split like their weights.
        "llama": _train(model_folders["llama"], base / "llama", 1, 2, chunk=5, micro_batch=2),
        "qwen2": _train(model_folders["qwen2"], base / "qwen2", 2, 1, chunk=8, micro_batch=5),
        # Experts on one rank, and two on each of two.
        "moe": _train(model_folders["moe"], base / "moe", 1, 1, chunk=12, micro_batch=12),
        "moe_ep2": _train(model_folders["moe"], base / "moe_ep2", 1, 2, chunk=5, micro_batch=2, expert_parallel=2),
        "bf16": _train(model_folder, base / "bf16", 2, 1, chunk=8, micro_batch=5, dtype="bfloat16"),
    }


def _relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("layout", "whole"), [("split", "one"), ("tp2", "one"), ("dp2", "one"), ("moe_ep2", "moe")])
def test_I9_split_and_layout_change_neither_loss_nor_gradients(
    outcomes: dict[str, Outcome], layout: str, whole: str
) -> None:
    one, other = outcomes[whole], outcomes[layout]
    for loss in ("loss", "loss_second"):
        assert other.ranks[0][loss] == pytest.approx(one.ranks[0][loss], rel=1e-6)
    found, expected = other.tensors["gradients"], one.tensors["gradients"]
    assert found.keys() == expected.keys()
    all_found, all_expected = (torch.cat([g[name].flatten() for name in expected]) for g in (found, expected))
    assert _relative_difference(all_found, all_expected) < 1e-6
    # A head norm has 16 elements that are sums of large terms of both signs: so the rounding of fp32 alone is larger.
    for name, gradient in expected.items():
        assert _relative_difference(found[name], gradient) < 3e-6, name


@pytest.mark.parametrize(
    ("layout", "tensor", "expert"),
    [("one", 1, 1), ("tp2", 2, 1), ("llama", 1, 1), ("qwen2", 2, 1), ("moe", 1, 1), ("moe_ep2", 1, 2)],
)
def test_a_plan_counts_exactly_what_a_rank_holds(
    outcomes: dict[str, Outcome], model_folders: dict[str, Path], layout: str, tensor: int, expert: int
) -> None:
    folder = model_folders.get(layout.partition("_")[0], model_folders["qwen3"])
    sizes = model_sizes(read_model_config(folder))
    counted = sizes.shared_elements(tensor) + sizes.expert_elements // expert
    assert {rank["parameters"] for rank in outcomes[layout].ranks} == {counted}


def test_expert_parallel_ranks_hold_half_of_the_experts_each(outcomes: dict[str, Outcome]) -> None:
    config = FAMILIES["moe"]
    experts = config.num_hidden_layers * config.num_experts * 3 * config.moe_intermediate_size * config.hidden_size
    whole = outcomes["moe"].ranks[0]["parameters"]
    assert [rank["parameters"] for rank in outcomes["moe_ep2"].ranks] == [whole - experts // 2] * 2


def test_bf16_over_two_ranks_keeps_to_its_own_bound(outcomes: dict[str, Outcome]) -> None:
    """8 bits of every weight and activation, at TP=2, against fp32 on one rank."""
    one, other = outcomes["one"], outcomes["bf16"]
    assert other.ranks[0]["loss"] == pytest.approx(one.ranks[0]["loss"], rel=0.02)
    found, expected = other.tensors["gradients"], one.tensors["gradients"]
    difference = _relative_difference(*(torch.cat([g[name].flatten() for name in expected]) for g in (found, expected)))
    assert 1e-4 < difference < 0.05


def test_tensor_parallel_rank_holds_less_than_60_percent(outcomes: dict[str, Outcome]) -> None:
    whole = outcomes["one"].ranks[0]["parameters"]
    assert all(rank["parameters"] < 0.6 * whole for rank in outcomes["tp2"].ranks)


@pytest.mark.parametrize("layout", ["one", "tp2", "dp2", "moe_ep2", "bf16"])
def test_state_restores_bitwise_and_replays_bitwise(outcomes: dict[str, Outcome], layout: str) -> None:
    for rank in outcomes[layout].ranks:
        assert rank["restored_equal"]
        assert rank["replayed_equal"]
        assert rank["loss_replayed"] == rank["loss_second"]
        assert rank["labels"] == {"version": 1}


@pytest.mark.parametrize("layout", ["one", "tp2", "dp2", "moe_ep2"])
def test_ratio_is_one_on_fresh_data(outcomes: dict[str, Outcome], layout: str) -> None:
    for rank in outcomes[layout].ranks:
        assert rank["ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert rank["logprob_abs_diff_max"] < 1e-5
        assert rank["tokens_of_current_version"] > 0


def test_norms_are_not_decayed_by_the_real_optimizer(outcomes: dict[str, Outcome]) -> None:
    assert [rank["decayed_norms"] for outcome in outcomes.values() for rank in outcome.ranks] == [0] * 15


@pytest.mark.parametrize("layout", ["one", "tp2", "dp2", "moe_ep2"])
def test_non_finite_update_is_left_out_and_the_third_in_a_row_names_rows(
    outcomes: dict[str, Outcome], layout: str
) -> None:
    for rank in outcomes[layout].ranks:
        assert rank["unchanged_by_poison"]
        assert rank["poison_says"].startswith("3 updates in a row skipped")
    assert any("/1/0" in rank["poison_says"] for rank in outcomes[layout].ranks)


@pytest.mark.parametrize("layout", ["one", "tp2", "dp2", "llama", "qwen2", "moe", "moe_ep2"])
def test_loading_and_exporting_again_is_bit_identical(
    outcomes: dict[str, Outcome], model_folders: dict[str, Path], layout: str
) -> None:
    expected = load_file(model_folders.get(layout.partition("_")[0], model_folders["qwen3"]) / "model.safetensors")
    exported: dict[str, torch.Tensor] = {}
    for file in (outcomes[layout].folder / "export-initial").glob("*.safetensors"):
        exported |= load_file(file)
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("layout", ["one", "tp2", "dp2", "llama", "qwen2", "moe", "moe_ep2"])
def test_export_in_transformers_gives_the_trainers_logits(outcomes: dict[str, Outcome], layout: str) -> None:
    outcome = outcomes[layout]
    seen = outcome.tensors
    model = AutoModelForCausalLM.from_pretrained(outcome.folder / "export-trained").eval()
    logits = seen["logits"].split([len(tokens) - 1 for tokens in seen["tokens"]])
    for found, log_probs, tokens, temperature in zip(
        logits, seen["log_probs"], seen["tokens"], seen["temperatures"], strict=True
    ):
        with torch.no_grad():
            expected = model(tokens[None]).logits[0]
        assert float((found - expected[:-1]).abs().max()) < 1e-5
        reference = torch.log_softmax(expected.float() / temperature, -1)[:-1].gather(1, tokens[1:, None])[:, 0]
        assert float((log_probs[1:] - reference).abs().max()) < 1e-5
