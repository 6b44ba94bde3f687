"""I9: a step's updates are the same however its rows are split over micro-batches, data- and tensor-parallel ranks, for
losses over sequences, selections over the whole update, and several updates per step."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from update_rank import SECTIONS

pytestmark = pytest.mark.timeout(600)
SUPPORT = Path(__file__).parents[2] / "support"
WORKER = SUPPORT / "update_rank.py"
LAYOUTS = {
    "one": {"tensor-parallel": 1, "world-size": 1, "micro-batch-rows": 12},
    "split": {"tensor-parallel": 1, "world-size": 1, "micro-batch-rows": 3},
    "dp2": {"tensor-parallel": 1, "world-size": 2, "micro-batch-rows": 4},
    "tp2": {"tensor-parallel": 2, "world-size": 2, "micro-batch-rows": 5},
}

Seen = list[list[dict[str, float]]]


def train(model: Path, out: Path, layout: dict[str, int]) -> Seen:
    out.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options: dict[str, Any] = {**layout, "port": port, "model": model, "out": out}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), "--rank", str(rank), *words],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(layout["world-size"])
    ]
    errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(errors)
    seen: list[Seen] = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(len(ranks))]
    assert all(other == seen[0] for other in seen), "every rank reports the same"
    return seen[0]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    folder = tmp_path_factory.mktemp("updates")
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.08,
    )
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return {name: train(folder / "model", folder / name, layout) for name, layout in LAYOUTS.items()}


@pytest.mark.parametrize("layout", ["split", "dp2", "tp2"])
@pytest.mark.parametrize("index", range(len(SECTIONS)), ids=lambda index: SECTIONS[index]["name"])
def test_I9_every_update_is_the_same_in_every_split(seen: dict[str, Seen], layout: str, index: int) -> None:
    whole, other = seen["one"][index], seen[layout][index]
    assert len(whole) == len(other)
    for expected, found in zip(whole, other, strict=True):
        assert found == pytest.approx(expected, rel=2e-6, abs=1e-6)


def test_every_update_has_a_gradient_and_the_selections_are_not_empty(seen: dict[str, Seen]) -> None:
    for section, updates in zip(SECTIONS, seen["one"], strict=True):
        assert all(update["grad_norm"] > 0 for update in updates[:-1]), section
        if section["name"] in ("kl_cov", "clip_cov", "m2po"):
            assert all(update["selected"] > 0 for update in updates[:-1]), section


def test_a_second_update_sees_the_log_probs_of_the_step_and_not_its_own(seen: dict[str, Seen]) -> None:
    """On rows that the weights themselves have sampled the first update has ratio 1, and the second one has not."""
    *once, measured_once = seen["one"][SECTIONS.index({"name": "grpo", "on_policy": True})]
    *twice, measured_twice = seen["one"][SECTIONS.index({"name": "grpo", "on_policy": True, "passes_per_step": 2})]
    assert measured_once["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert measured_twice["ratio_max"] > 1.001
    assert [update["loss"] for update in twice[:1]] == [update["loss"] for update in once]
    assert twice[1]["loss"] < twice[0]["loss"], "the second update goes on from the first"
