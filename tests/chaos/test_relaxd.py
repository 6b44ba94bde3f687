"""relaxd dies again and again, is frozen, or stays away for good: the run goes on, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relaxd.ctl import relaxd_process
from relaxd.ctl.relaxd_process import RelaxdProcess
from relaxd.launch.local import pids_with_state_below
from relaxd.plan.code_names import CodeNames

SUPPORT = Path(__file__).parents[1] / "support"
KILLS = 9
"""More than the deaths in a row that relaxctl allows: each is followed by progress."""
TTL_SECONDS = 3.0


def commits(run: Any) -> int:
    paths = list(run.folder.glob("runs/*/events.jsonl"))
    return paths[0].read_text(errors="replace").count('"kind":"commit"') if paths else 0


def relaxd_pid(run: Any) -> int:
    """0 while relaxd is not running."""
    for pid in pids_with_state_below(run.run_dir / "state"):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"relaxd" in words:
            return pid
    return 0


def test_any_number_of_deaths_of_relaxd_with_progress_in_between_is_survived(start_run: Callable) -> None:
    assert len(relaxd_process.RESTART_DELAYS) < KILLS
    run = start_run("", f"total_steps={2 * KILLS + 4}")
    for number in range(KILLS):
        run.wait_for(f"version {2 * number + 2}", lambda number=number: commits(run) > 2 * number + 2)
        os.kill(run.wait_for("relaxd", lambda: relaxd_pid(run)), signal.SIGKILL)
    result = run.finish()
    assert result.counts["rolled_back_ever"] == 0
    assert (run.run_dir / "logs" / "relaxd.log").read_text().count('"event": "serving"') == KILLS + 1


def test_a_relaxd_that_was_frozen_replaces_nobody(start_run: Callable) -> None:
    run = start_run("", "total_steps=14", RELAX_RELAXD__TTL_SECONDS=str(TTL_SECONDS))
    run.wait_for("three versions", lambda: commits(run) > 3)
    pid = relaxd_pid(run)
    daemons = set(pids_with_state_below(run.run_dir / "state" / "daemons"))
    os.kill(pid, signal.SIGSTOP)
    # Here the time itself is tested: it is longer than every daemon's time to live.
    time.sleep(2 * TTL_SECONDS)
    os.kill(pid, signal.SIGCONT)
    before = commits(run)
    run.wait_for("another version", lambda: commits(run) > before)
    assert daemons <= set(pids_with_state_below(run.run_dir / "state" / "daemons")), "nobody was replaced"
    run.finish()
    kinds = [event["kind"] for event in run.events()]
    assert "rollback" not in kinds


def test_whoever_gives_relaxd_up_stops_what_it_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaxd_process, "RESTART_DELAYS", (0.0, 0.0))
    run_dir = tmp_path / "run"
    state = run_dir / "state"
    state.mkdir(parents=True)
    # No database: relaxd ends at every start.
    (state / "relaxd.sqlite").mkdir()
    orphan = subprocess.Popen(
        [sys.executable, "-m", "timed_work", "--state-dir", str(state / "daemons" / "queue"), "--seconds", "100"],
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
    )
    try:
        relaxd = RelaxdProcess(run_dir, CodeNames())
        end = time.monotonic() + 60
        while not relaxd.failure:
            assert time.monotonic() < end, "relaxd was not given up"
            time.sleep(0.05)
        assert "3 times in a row without progress (exit 1)" in relaxd.failure
        assert "relaxd.sqlite" in relaxd.failure or "unable to open database" in relaxd.failure
        relaxd.stop()
        assert orphan.wait(30) is not None
        assert not list(pids_with_state_below(state))
    finally:
        orphan.kill()
