"""The quick start with SGLang, which hangs in the middle: the run still succeeds, and no group is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax.common.v1 import common_pb2
from relax.controller.v1 import controller_pb2, controller_pb2_grpc
from relax.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from relax_common.rpc.channels import sync_channel
from relaxd.run.files import read_lines
from relaxd.run.ledger import audit

RUN_SECONDS = 420.0
STEPS = 12


def start(folder: Path, material: Path, *settings: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "relaxd.ctl.main", "run", str(material / "quickstart.toml")]
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [*command, *(word for setting in settings for word in ("--set", setting))],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def wait_for(what: str, found: Callable[[], Any], process: subprocess.Popen[bytes], folder: Path) -> Any:
    end = time.monotonic() + RUN_SECONDS
    while time.monotonic() < end and process.poll() is None:
        if value := found():
            return value
        time.sleep(0.05)
    raise AssertionError(f"no {what}: {(folder / 'output').read_text(errors='replace')[-2000:]}")


def committed(folder: Path) -> int:
    paths = list(folder.glob("runs/*/metrics.jsonl"))
    return sum(1 for _ in read_lines(paths[0])) if paths else 0


def rollout_daemon(folder: Path) -> controller_pb2.Daemon:
    address = next(folder.glob("runs/*/relaxd.address")).read_text().strip()
    stub = controller_pb2_grpc.ControllerServiceStub(sync_channel(address))
    daemons = stub.ListDaemons(controller_pb2.ListDaemonsRequest(), timeout=10).daemons
    return next(daemon for daemon in daemons if daemon.identity.role == common_pb2.ROLE_ROLLOUT)


@pytest.mark.timeout(900)
def test_I1_I6_a_run_whose_engine_hangs_loses_no_group(
    tmp_path: Path, quickstart_material: Path, engine_python: str
) -> None:
    process = start(
        tmp_path,
        quickstart_material,
        "rollout.engine=sglang",
        f"rollout.engine_python={engine_python}",
        "rollout.engine_silence_seconds=6.0",
        "rollout.engine_options.schedule_policy=fcfs",
        f"total_steps={STEPS}",
        "samples_per_prompt=8",
        "max_staleness=1",
    )
    try:
        wait_for("committed step", lambda: committed(tmp_path) >= 3, process, tmp_path)
        daemon = rollout_daemon(tmp_path)
        stub = rollout_pb2_grpc.RolloutServiceStub(sync_channel(daemon.address))

        def status() -> rollout_pb2.GetStatusResponse:
            return stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=10)

        before = status()
        assert before.engine_restarts == 0
        assert before.engine.startswith("sglang 0.5.23 on ")
        pid = int(before.engine.rpartition("pid ")[2])
        os.kill(pid, signal.SIGSTOP)
        lost = wait_for("loss", lambda: (now := status()).engine_restarts and now, process, tmp_path)
        assert lost.serving == rollout_pb2.SERVING_STATE_UNVERIFIED
        assert "has not answered for 6 s" in lost.engine + lost.waits_for
        assert not Path(f"/proc/{pid}").exists()
        back = wait_for(
            "verified engine",
            lambda: (now := status()).serving != rollout_pb2.SERVING_STATE_UNVERIFIED and now,
            process,
            tmp_path,
        )
        assert back.term == before.term
        assert int(back.engine.rpartition("pid ")[2]) != pid
        with urllib.request.urlopen(f"http://{daemon.metrics_address}/metrics", timeout=10) as metrics:
            assert "relax_rollout_engine_restarts_total 1.0" in metrics.read().decode()
        assert process.wait(RUN_SECONDS) == 0
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    check_run(next((tmp_path / "runs").glob("*")))


def check_run(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["max_staleness_seen"] <= 1
    assert not audit(read_lines(run_dir / "events.jsonl"), ended=True, max_staleness=1).faults
    differences = [line.get("logprob_abs_diff_mean", 0.0) for line in read_lines(run_dir / "metrics.jsonl")]
    assert len(differences) == STEPS
    assert max(differences) <= 1e-5
    log = (run_dir / "logs" / "rollout-0.log").read_text()
    assert re.findall(r'"event": "(engine_\w+)"', log) == [
        "engine_started",
        "engine_lost",
        "engine_started",
        "engine_serves_again",
    ]
