"""One run of the SmolLM2 recipe through `relaxctl`, with the CPU seconds of everything it started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.arith.cpu_meter import CpuMeter
from relaxd.run.files import read_lines

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes/smollm2_arith.toml"
RUN_SECONDS = 3600.0
PHASES = ("wait", "train", "publish", "snapshot", "commit")


@dataclass(frozen=True)
class Outcome:
    """`samples` are those that were generated and used or dropped for want of signal between first lease and last
    commit; the CPU seconds are of the same time."""

    name: str
    rewards: tuple[float, ...]
    step_end_seconds: tuple[float, ...]
    samples: int
    tokens: int
    wall_seconds: float
    cpu_seconds: dict[str, float]
    phase_seconds: dict[str, float]
    greedy_accuracy: float

    @property
    def cpu_seconds_total(self) -> float:
        return sum(self.cpu_seconds.values())

    @property
    def samples_per_cpu_second(self) -> float:
        return self.samples / self.cpu_seconds_total

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"samples_per_cpu_second": self.samples_per_cpu_second}


def run_recipe(name: str, settings: Sequence[str], runs_dir: Path, model: Path, data: Path) -> Outcome:
    """Raises SystemExit if the run fails."""
    chosen = [f"model.path={model}", f"data.path={data}", *settings]
    command = [
        *(sys.executable, "-m", "relaxd.ctl.main", "--runs-dir", str(runs_dir), "run", str(RECIPE)),
        *(word for each in chosen for word in ("--set", each)),
    ]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=sys.stderr, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    )
    try:
        with CpuMeter(process.pid) as meter:
            code = process.wait(RUN_SECONDS)
    finally:
        process.terminate()  # relaxctl stops its daemons
    if code:
        raise SystemExit(f"the run {name} ended with {code}; see {runs_dir}")
    run_dir = max(runs_dir.iterdir(), key=lambda path: path.stat().st_mtime)
    return _outcome(name, run_dir, meter, data)


def _outcome(name: str, run_dir: Path, meter: CpuMeter, data: Path) -> Outcome:
    from benchmarks.arith.greedy import accuracy

    events = list(read_lines(run_dir / "events.jsonl"))
    lines = list(read_lines(run_dir / "metrics.jsonl"))
    first = next(event["time"] for event in events if event["kind"] == "leased")
    commits = [event["time"] for event in events if event["kind"] == "commit" and event["version"]]
    done = [e for e in events if e["kind"] == "completed" and e["time"] <= commits[-1]]
    return Outcome(
        name=name,
        rewards=tuple(line["reward_mean"] for line in lines),
        step_end_seconds=tuple(at - first for at in commits),
        samples=sum(event["valid_samples"] for event in done),
        tokens=sum(int(line["tokens"]) for line in lines),
        wall_seconds=commits[-1] - first,
        cpu_seconds=meter.between(first, commits[-1]),
        phase_seconds={phase: median(line.get(f"seconds_{phase}", 0.0) for line in lines) for phase in PHASES},
        greedy_accuracy=accuracy(run_dir / "export", data),
    )


def steps_per_hour(outcome: Outcome) -> float:
    """By the median step."""
    gaps = [b - a for a, b in pairwise(outcome.step_end_seconds)]
    return 3600.0 / median(gaps)
