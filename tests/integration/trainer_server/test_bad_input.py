"""Mistakes that users make: each gives one line that says what to do, and leaves nothing half-written."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relax.common.v1 import common_pb2
from relax.controller.v1 import controller_pb2, controller_pb2_grpc
from relax_common.errors import from_rpc
from relax_common.rpc.channels import sync_channel
from relax_common.rpc.registration import make_identity

RECIPE = """
name = "bad"
total_steps = 2
prompts_per_step = 2
samples_per_prompt = 2
[model]
path = "model"
[data]
path = "data.jsonl"
prompt_tokens_max = 8
[sampling]
max_new_tokens = 4
"""


@pytest.fixture
def recipe(tmp_path: Path, quickstart_material: Path) -> Path:
    """A valid recipe, which each test spoils in its own way."""
    made = quickstart_material / "quickstart/made"
    (tmp_path / "model").symlink_to(made / "model")
    (tmp_path / "data.jsonl").write_text((made / "data.jsonl").read_text())
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def relaxctl(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "relaxd.ctl.main", *args],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "200"},
    )


def refused(recipe: Path, words: str, *overrides: str) -> None:
    before = sorted(recipe.parent.rglob("*"))
    settings = [word for override in overrides for word in ("--set", override)]
    result = relaxctl(recipe.parent, "run", str(recipe), *settings)
    assert result.returncode != 0
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert words in result.stderr
    assert sorted(recipe.parent.rglob("*")) == before


def test_a_good_recipe_passes_the_dry_run_and_prints_its_budgets(recipe: Path) -> None:
    result = relaxctl(recipe.parent, "run", str(recipe), "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "queue_bytes_needed" in result.stdout


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("max_stalenes=1", "did you mean 'max_staleness'?"),
        ("queue.memory_budget_bytes=100", "queue.memory_budget_bytes = 100 cannot hold"),
        ("dcs.memory_budget_bytes=100", "dcs.memory_budget_bytes = 100 cannot hold"),
        ("actor.tensor_parallel_size=3", "does not divide the model's 4 attention heads"),
        ("model.path=elsewhere", "no such folder"),
        ("data.path=elsewhere.jsonl", "No such file or directory"),
        ("data.prompt_tokens_max=3", "line 1: the prompt has 4 tokens"),
        ("sampling.max_new_tokens=100000", "actor.tokens_per_microbatch"),
        ("data.passes=0.5", "data.passes"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_starts(recipe: Path, override: str, words: str) -> None:
    refused(recipe, words, override)


def test_data_that_cannot_fill_a_step_is_refused(recipe: Path) -> None:
    refused(recipe, "do not fill one step of 200 prompts", "prompts_per_step=200", "data.passes=1")


def test_unreadable_and_empty_data_are_named_with_their_line(recipe: Path) -> None:
    data = recipe.parent / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "label": "02"}\n{"prompt": \n')
    refused(recipe, "data.jsonl, line 2: not valid JSON")
    data.write_text("\n")
    refused(recipe, "data.jsonl: no rows")


def test_prompts_that_are_left_out_are_counted_before_anything_starts(recipe: Path) -> None:
    rows = [{"prompt": prompt, "label": "02"} for prompt in ("1+1=", "1+1=" * 30, "2+0=")]
    pq.write_table(pa.Table.from_pylist(rows), recipe.parent / "data.parquet")
    settings = ("--set", "data.path=data.parquet", "--set", "data.over_length=drop")
    result = relaxctl(recipe.parent, "run", str(recipe), "--dry-run", *settings)
    assert result.returncode == 0, result.stderr
    assert "2 prompts, 1 left out: longer than data.prompt_tokens_max" in " ".join(result.stdout.split())


def test_an_unsupported_or_broken_checkpoint_is_named(recipe: Path) -> None:
    model = recipe.parent / "model"
    real = model.resolve()
    model.unlink()
    model.mkdir()
    refused(recipe, "config.json: No such file")
    config = json.loads((real / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config))
    refused(recipe, "no .safetensors file")
    (model / "model.safetensors").write_bytes(b"\xff" * 16)
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    refused(recipe, "architecture MambaForCausalLM is not supported; supported: LlamaForCausalLM")
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").symlink_to(real / "tokenizer.json")
    refused(recipe, "cut off, or not a safetensors file")


def test_commands_about_unknown_runs_say_which_there_are(tmp_path: Path) -> None:
    for args in (("ledger", "none"), ("logs", "none"), ("export", "none", "out"), ("status",)):
        result = relaxctl(tmp_path, *args)
        assert result.returncode == 1
        assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("module", ["relaxd", "relax_queue", "dcs"])
def test_a_port_in_use_is_named(tmp_path: Path, module: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for flag in ("--listen", "--metrics-listen"):
            result = subprocess.run(
                [sys.executable, "-m", module, flag, address, "--state-dir", str(tmp_path / module)],
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert result.returncode == 3
            assert f"on {address}" in result.stderr.splitlines()[-1]
            assert "choose another" in result.stderr.splitlines()[-1]


def test_a_daemon_of_another_protocol_version_is_refused(start_daemon: Callable) -> None:
    stub = controller_pb2_grpc.ControllerServiceStub(sync_channel(start_daemon("relaxd").address))
    identity = make_identity(common_pb2.ROLE_QUEUE, "queue")
    identity.protocol_version += 1
    with pytest.raises(grpc.RpcError) as caught:
        stub.Register(controller_pb2.RegisterRequest(identity=identity, address="127.0.0.1:1"), timeout=10)
    error = from_rpc(caught.value)
    assert error.reason == "PROTOCOL_MISMATCH"
    assert "install the same release on both" in error.message


def test_a_run_is_created_once_for_a_repeated_request_and_validated_without_a_trace(
    start_daemon: Callable, recipe: Path
) -> None:
    daemon = start_daemon("relaxd")
    stub = controller_pb2_grpc.ControllerServiceStub(sync_channel(daemon.address))
    text = RECIPE.replace('"model"', f'"{recipe.parent / "model"}"').replace(
        '"data.jsonl"', f'"{recipe.parent / "data.jsonl"}"'
    )
    only = stub.CreateRun(controller_pb2.CreateRunRequest(recipe_toml=text, validate_only=True), timeout=20)
    assert only.derived
    assert not stub.ListRuns(controller_pb2.ListRunsRequest(), timeout=10).runs
    with pytest.raises(grpc.RpcError) as caught:
        stub.CreateRun(controller_pb2.CreateRunRequest(recipe_toml=text), timeout=20)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert not (daemon.folder / "state" / "runs").exists()
