"""PPO's critic as a daemon of a real run, killed in mid-step, alone and with the actor: the ledger is exact, and its
state ends where that of an undisturbed run ends."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoModelForTokenClassification

PPO = (
    'algorithm={name="ppo",gamma=0.99,gae_lambda=0.95}',
    "critic.lr=5e-4",
    # The same rows in every run: then states can be compared.
    "max_staleness=0",
    "queue.deterministic=true",
)
STEPS = 8


def value_losses(run: Any) -> dict[int, float]:
    """By step; what is said last counts."""
    text = (run.run_dir / "logs" / "critic-0.log").read_text(errors="replace")
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
    return {line["step"]: line["value_loss"] for line in lines if line["event"] == "critic_trained"}


def exports(run: Any) -> dict[str, dict[str, np.ndarray]]:
    folders = {"actor": "export", "critic": "export-critic"}
    return {role: load_file(run.run_dir / folder / "model.safetensors") for role, folder in folders.items()}


def assert_equal(one: dict[str, dict[str, np.ndarray]], other: dict[str, dict[str, np.ndarray]]) -> None:
    for role, tensors in one.items():
        assert tensors.keys() == other[role].keys()
        for name, tensor in tensors.items():
            assert np.array_equal(tensor, other[role][name]), f"{role}: {name}"


@pytest.fixture(scope="module")
def undisturbed(undisturbed_run: Callable) -> Any:
    """A run without a kill, ended; each worker of the test runner makes its own."""
    run = undisturbed_run(*PPO)
    assert run.finish().counts["rolled_back_ever"] == 0
    return run


def test_a_run_with_a_critic_trains_both_and_exports_both(undisturbed: Any) -> None:
    run = undisturbed
    assert set(value_losses(run)) == set(range(STEPS))
    folder = run.run_dir / "export-critic"
    model = AutoModelForTokenClassification.from_pretrained(folder)
    assert model.config.num_labels == 1
    assert float(model.score.weight.detach().abs().max()) > 0, "the value head was trained"


@pytest.mark.parametrize(
    "failpoints",
    [
        "critic.after_update=kill@2,critic.after_snapshot=kill@3",
        "critic.after_write=kill@4,actor.after_optimizer_step=kill@3",
        "critic.after_update=kill@3,actor.after_commit_heard=kill@4",
    ],
)
def test_I1_I9_a_killed_critic_comes_back_to_the_same_state(
    start_run: Callable, undisturbed: Any, failpoints: str
) -> None:
    run = start_run(failpoints, *PPO)
    result = run.finish()
    assert run.fired_points() == {point.split("=")[0] for point in failpoints.split(",")}
    assert result.counts["rolled_back_ever"] == 0
    assert_equal(exports(run), exports(undisturbed))
    assert value_losses(run) == value_losses(undisturbed)


def test_I1_critic_and_actor_and_dcs_killed_at_once_go_on_from_the_recovery_copy(start_run: Callable) -> None:
    run = start_run("", *PPO)
    run.wait_for("four commits", lambda: _commits(run) >= 5)
    for pid in run.daemon_pids():
        if any(f"{name}" in _command(pid) for name in ("--role actor", "--role critic", "-m dcs")):
            os.kill(pid, signal.SIGKILL)
    result = run.finish()
    assert result.counts["rolled_back_ever"] <= 1, "no more than snapshot_every steps"
    assert set(value_losses(run)) == set(range(STEPS))


def _commits(run: Any) -> int:
    try:
        return sum(event["source"] == "dcs" and event["kind"] == "commit" for event in run.events())
    except (StopIteration, FileNotFoundError):
        return 0


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except FileNotFoundError:
        return ""
