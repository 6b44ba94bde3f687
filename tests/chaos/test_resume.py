"""Stop and resume; and everything killed at once: the run goes on from its newest whole checkpoint, nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_common.storage.checkpoint_folder import find_checkpoints, state_file, version_of
from relaxd.run.ledger import audit

EVERY_TWO = "checkpoint.every_steps=2"


def relaxctl(run: Any, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "relaxd.ctl.main", *words],
        cwd=run.folder,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stdout + done.stderr + run.explain()
    return done.stdout


def commits(run: Any) -> list[dict[str, Any]]:
    return [event for event in run.events() if event["source"] == "dcs" and event["kind"] == "commit"]


def test_a_stopped_run_goes_on_where_it_was(start_run: Callable) -> None:
    run = start_run("", EVERY_TWO, "total_steps=40")
    run.wait_for("a checkpoint", lambda: list(run.folder.glob("runs/*/checkpoints/version-*")))
    relaxctl(run, "stop", run.run_dir.name)
    assert run.process.wait(60) == 0, run.explain()
    head = commits(run)[-1]["version"]
    assert head < 40, "it was stopped before its end"
    assert max(found.version.number for found in find_checkpoints(run.run_dir / "checkpoints")) == head

    assert "40 steps" in relaxctl(run, "resume", run.run_dir.name)
    assert [commit["version"] for commit in commits(run)] == list(range(41))
    result = audit(run.events(), ended=True, max_staleness=1)
    assert not result.faults
    assert result.counts["rolled_back_ever"] == 0
    assert "nothing is left to do" in relaxctl(run, "resume", run.run_dir.name)

    newest = run.run_dir / "checkpoints" / "version-00000040.0"
    assert "after 40 steps" in relaxctl(run, "export", str(newest), "exported")
    ours = (run.folder / "exported" / "model.safetensors").read_bytes()
    assert len(ours) == (run.run_dir / "export" / "model.safetensors").stat().st_size
    assert "0.40" in relaxctl(run, "checkpoint", "list", run.run_dir.name)


def test_I1_everything_killed_at_once_goes_on_from_the_newest_whole_checkpoint(start_run: Callable) -> None:
    run = start_run("", EVERY_TWO, "dcs.recovery_on_disk=false")

    def saved() -> list[Path]:
        return sorted(run.folder.glob("runs/*/checkpoints/version-*"))

    run.wait_for("two checkpoints", lambda: len(saved()) >= 2)
    run.process.kill()  # first: it would start relaxd again
    run.process.wait(20)
    for pid in run.daemon_pids():
        os.kill(pid, signal.SIGKILL)
    *_, whole, damaged = saved()
    path = damaged / state_file("actor", 0)
    path.write_bytes(path.read_bytes()[:-1024])

    relaxctl(run, "resume", run.run_dir.name)
    assert f"{damaged.name}" in (run.run_dir / "logs" / "dcs.log").read_text()
    seen = [(commit["lineage"], commit["version"]) for commit in commits(run)]
    again = [number for lineage, number in seen if lineage == 1]
    assert again == list(range(int(whole.name[8:16]) + 1, 9))
    result = audit(run.events(), ended=True, max_staleness=1)
    assert not result.faults
    assert result.counts["rolled_back_ever"] > 0
    line = [commit for commit in commits(run) if commit["lineage"] == 1 or commit["version"] < again[0]]
    trained = [group for commit in line for group in commit["groups"]]
    assert len(trained) == len(set(trained))


@pytest.mark.parametrize("every_steps", [0, 100])
def test_I1_everything_killed_at_once_goes_on_from_the_recovery_copy_of_dcs(
    start_run: Callable, every_steps: int
) -> None:
    run = start_run("", f"checkpoint.every_steps={every_steps}")
    run.wait_for("four commits", lambda: len(commits_so_far(run)) >= 5)
    run.process.kill()  # first: it would start relaxd again
    run.process.wait(20)
    for pid in run.daemon_pids():
        os.kill(pid, signal.SIGKILL)
    copies = [version_of(path.name) for path in run.run_dir.glob("state/daemons/dcs/recovery/*/*")]
    on_disk = max(version.number for version in copies if version)
    relaxctl(run, "resume", run.run_dir.name)
    assert_nothing_before_is_lost(run, on_disk)
    assert audit(run.events(), ended=True, max_staleness=1).counts["trained"] > 0


def test_I1_dcs_and_actor_killed_together_lose_at_most_snapshot_every_steps(start_run: Callable) -> None:
    run = start_run("")
    run.wait_for("four commits", lambda: len(commits_so_far(run)) >= 5)
    for pid in pids_of(run, "dcs", "trainer_server"):
        os.kill(pid, signal.SIGKILL)
    committed = json.loads(commits_so_far(run)[-1])["version"]
    run.finish()
    assert_nothing_before_is_lost(run, committed - 1)


def assert_nothing_before_is_lost(run: Any, version: int) -> None:
    """No rollback goes back further than this, and every version is committed in the end."""
    records = [event for event in run.events() if event["source"] == "dcs" and event["kind"] in ("commit", "rollback")]
    head = -1
    for event in records:
        if event["kind"] == "rollback":
            head = int(event.get("head", 0))
            assert head >= version, event["reason"]
        else:
            assert event["version"] == head + 1
            head = event["version"]
    assert head == 8


def commits_so_far(run: Any) -> list[str]:
    paths = list(run.folder.glob("runs/*/events.jsonl"))
    lines = paths[0].read_text().splitlines() if paths else []
    return [line for line in lines if '"commit"' in line and '"dcs"' in line]


def pids_of(run: Any, *modules: str) -> list[int]:
    found = [
        pid
        for pid in run.daemon_pids()
        if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:3] in [[b"-m", each.encode()] for each in modules]
    ]
    assert len(found) == len(modules), run.explain()
    return found


def test_a_stopped_run_is_lengthened_by_a_larger_total_steps_in_its_recipe(start_run: Callable) -> None:
    run = start_run("", EVERY_TWO, "total_steps=40")
    run.wait_for("a checkpoint", lambda: list(run.folder.glob("runs/*/checkpoints/version-*")))
    relaxctl(run, "stop", "latest")
    assert run.process.wait(60) == 0, run.explain()
    recipe = run.run_dir / "recipe.toml"
    recipe.write_text(
        recipe.read_text().replace("total_steps = 40", "total_steps = 43").replace("\nseed = 0", "\nseed = 5")
    )

    told = relaxctl(run, "resume", "latest")
    assert "edited in seed: ignored" in told
    assert "lengthened from 40 to 43 steps" in told
    assert "43 steps" in told
    assert [commit["version"] for commit in commits(run)] == list(range(44))
    assert not audit(run.events(), ended=True, max_staleness=1).faults
