"""Chaos tests run `relaxctl run` on the quick-start task with named failpoints, and check what is left afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relaxd.run.files import read_lines
from relaxd.run.ledger import Audit, audit

RUN_SECONDS = 240.0
STEPS = 8


@dataclass
class ChaosRun:
    """One `relaxctl run` in a directory of its own."""

    process: subprocess.Popen[bytes]
    folder: Path
    fired: Path

    @property
    def run_dir(self) -> Path:
        return next((self.folder / "runs").glob("*"))

    def events(self) -> list[dict[str, Any]]:
        return list(read_lines(self.run_dir / "events.jsonl"))

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def wait_for(self, what: str, found: Callable[[], Any], seconds: float = 120.0) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = found()
            if value:
                return value
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended before {what}: {self.explain()}")
            time.sleep(0.05)
        raise AssertionError(f"waited {seconds:.0f} s for {what}: {self.explain()}")

    def explain(self) -> str:
        """The first things that a person would look at."""
        words = [self.output()[-1500:]]
        for path in sorted(self.run_dir.glob("logs/*.log")):
            words.append(f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}")
        return "\n".join(words)

    def finish(self) -> Audit:
        """Wait for the end. The run must succeed, and every group must be accounted for."""
        try:
            code = self.process.wait(RUN_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {RUN_SECONDS:.0f} s: {self.explain()}") from None
        assert code == 0, self.explain()
        recipe = (self.run_dir / "recipe.toml").read_text()
        bound = int(next(line for line in recipe.splitlines() if line.startswith("max_staleness")).split("=")[1])
        result = audit(self.events(), ended=True, max_staleness=bound)
        assert not result.faults, result.faults
        assert result.commits >= STEPS + 1
        return result

    def daemon_pids(self) -> list[int]:
        """All live processes of this run: those that have the run directory in their command line."""
        marker = str(self.folder).encode()
        own = os.getpid()
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if marker in path.read_bytes() and int(path.parent.name) != own:
                    found.append(int(path.parent.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
        return found

    def fired_points(self) -> set[str]:
        return {path.name.removesuffix(".fired") for path in self.fired.glob("*.fired")}


StartRun = Callable[..., ChaosRun]


@pytest.fixture
def start_run(tmp_path: Path, quickstart_material: Path) -> Iterator[StartRun]:
    """start_run("actor.after_optimizer_step=kill@3", "actor.tensor_parallel_size=2", ...) -> ChaosRun"""
    started: list[ChaosRun] = []

    def start(failpoints: str, *overrides: str, **env: str) -> ChaosRun:
        started.append(_start(tmp_path, quickstart_material, failpoints, *overrides, **env))
        return started[-1]

    yield start
    for run in started:
        _stop(run)


@pytest.fixture(scope="module")
def undisturbed_run(tmp_path_factory: pytest.TempPathFactory, quickstart_material: Path) -> Iterator[StartRun]:
    """As `start_run` without failpoints, for a run with which several tests of a module compare theirs."""
    started: list[ChaosRun] = []

    def start(*overrides: str) -> ChaosRun:
        started.append(_start(tmp_path_factory.mktemp("undisturbed"), quickstart_material, "", *overrides))
        return started[-1]

    yield start
    for run in started:
        _stop(run)


def _start(folder: Path, material: Path, failpoints: str, *overrides: str, **env: str) -> ChaosRun:
    fired = folder / "fired"
    fired.mkdir()
    settings = [f"total_steps={STEPS}", "samples_per_prompt=8", "queue.lease_ttl_seconds=6.0", *overrides]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "relaxd.ctl.main", "run", str(material / "quickstart.toml")),
                *(word for setting in settings for word in ("--set", setting)),
            ],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RELAX_FAILPOINTS": failpoints,
                "RELAX_FAILPOINTS_DIR": str(fired),
                **env,
            },
        )
    return ChaosRun(process, folder, fired)


def _stop(run: ChaosRun) -> None:
    if run.process.poll() is None:
        run.process.send_signal(signal.SIGTERM)
        try:
            run.process.wait(60)
        except subprocess.TimeoutExpired:
            run.process.kill()
            run.process.wait(10)
