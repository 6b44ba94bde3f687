"""A long quick-start run: the memory of every daemon, its CPU time per step and the time of a step must stay flat.

    python tests/soak/run.py --steps 3000 --out soak        make soak

Writes OUT/soak.json and OUT/soak.svg. Flat means: between the second and the last fifth of the steps no daemon grew by
more than MB_MAX, no daemon needs more CPU time per step than before by more than SLOWER_MAX, and the median step did
not become slower by more than that. The first fifth is warm-up. On a machine that does other work too, the time of a
step says little, the CPU time still does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from relaxd.launch.local import pids_with_state_below
from relaxd.run.files import read_lines

REPOSITORY = Path(__file__).parents[2]
SAMPLE_SECONDS = 2.0
LEARNING_RATE = 1e-9
"""Nothing is learned: once a task is solved, most groups teach nothing and are dropped, so each step would need more
groups than the one before."""
MB_MAX = 8.0
SLOWER_MAX = 0.25
CPU_MIN = 0.01
"""Seconds per step; a daemon that needs less is not judged, because rounding would decide."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
SMOOTHED_STEPS = 25
"""Steps whose median is one point of the plot."""


def name_of(pid: int, run: str) -> str:
    """relaxd, queue, dcs, actor, rollout-0; empty for a process that has just ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    if "--instance" in words:
        return words[words.index("--instance") + 1].removeprefix(f"{run}.")
    return "relaxd" if "relaxd" in words else ""


def resident_bytes(pid: int) -> int:
    """Without shared memory: the bus and the weights that processes map belong to nobody alone."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return (int(resident) - int(shared)) * PAGE_BYTES


def cpu_seconds(pid: int) -> float:
    """Of the process since its start."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(words[11]) + int(words[12])) / TICKS_PER_SECOND


def sample(run_dir: Path) -> dict[str, dict[str, float]]:
    """Megabytes and CPU seconds by daemon. Children of a daemon (reward workers) carry no state directory and are left
    out."""
    found: dict[str, dict[str, float]] = {"megabytes": {}, "cpu_seconds": {}}
    for pid in pids_with_state_below(run_dir / "state"):
        name = name_of(pid, run_dir.name)
        if name:
            found["megabytes"][name] = resident_bytes(pid) / 1e6
            found["cpu_seconds"][name] = cpu_seconds(pid)
    return found


def watch(process: subprocess.Popen[bytes], runs: Path) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = []
    while process.poll() is None:
        time.sleep(SAMPLE_SECONDS)
        run_dir = next((path for path in runs.glob("*") if path.is_dir()), None)
        if run_dir is None or not (run_dir / "metrics.jsonl").exists():
            continue
        step = (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
        samples.append({"step": step, **sample(run_dir)})
    return samples


def judge(samples: list[dict[str, Any]], lines: list[dict[str, Any]], steps: int) -> tuple[dict[str, Any], list[str]]:
    """Figures, and what is not flat."""

    def median_of(low: float, high: float, values: list[tuple[int, float]]) -> float:
        chosen = [value for step, value in values if low * steps <= step <= high * steps]
        return statistics.median(chosen) if chosen else float("nan")

    faults, figures = [], {}
    names = sorted({name for each in samples for name in each["megabytes"]})
    for name in names:
        values = [(each["step"], each["megabytes"][name]) for each in samples if name in each["megabytes"]]
        early, late = median_of(0.2, 0.4, values), median_of(0.8, 1.0, values)
        figures[name] = {"megabytes_early": round(early, 1), "megabytes_late": round(late, 1)}
        if not late - early <= MB_MAX:
            faults.append(f"{name} grew from {early:.1f} to {late:.1f} MB")
        used = [(each["step"], each["cpu_seconds"][name]) for each in samples if name in each["cpu_seconds"]]
        early, late = (_slope(used, low * steps, (low + 0.2) * steps) for low in (0.2, 0.8))
        figures[name] |= {"cpu_seconds_per_step_early": round(early, 4), "cpu_seconds_per_step_late": round(late, 4)}
        if early > CPU_MIN and not late <= early * (1 + SLOWER_MAX):
            faults.append(f"{name} needs {late:.3f} s of CPU time per step, it needed {early:.3f} s")
    seconds = [(line["step"], line["seconds_step"]) for line in lines if "seconds_step" in line]
    early, late = median_of(0.2, 0.4, seconds), median_of(0.8, 1.0, seconds)
    figures["step"] = {"seconds_early": round(early, 4), "seconds_late": round(late, 4)}
    if not late <= early * (1 + SLOWER_MAX):
        faults.append(f"a step takes {late:.3f} s, it took {early:.3f} s")
    return figures, faults


def _slope(values: list[tuple[int, float]], first_step: float, last_step: float) -> float:
    # Not up to the last step: after it relaxd writes the report.
    chosen = [each for each in values if first_step <= each[0] < last_step]
    if len(chosen) < 2 or chosen[-1][0] == chosen[0][0]:
        return float("nan")
    return (chosen[-1][1] - chosen[0][1]) / (chosen[-1][0] - chosen[0][0])


def _smoothed(values: list[tuple[int, float]], size: int) -> list[tuple[float, float]]:
    """Medians of so many values each."""
    parts = [values[at : at + size] for at in range(0, len(values), size)]
    return [(statistics.median(x for x, _ in part), statistics.median(y for _, y in part)) for part in parts]


def plot(samples: list[dict[str, Any]], lines: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="tight")
    memory, seconds = figure.subplots(2, 1, sharex=True)
    for name in sorted({name for each in samples for name in each["megabytes"]}):
        values = [(each["step"], each["megabytes"][name]) for each in samples if name in each["megabytes"]]
        memory.plot(*zip(*_smoothed(values, max(1, len(values) // 100)), strict=True), label=name)
    memory.set(ylabel="MB resident, not shared", ylim=(0, None))
    memory.legend(frameon=False, ncols=5, fontsize=8)
    steps = [(line["step"], line["seconds_step"]) for line in lines if "seconds_step" in line]
    seconds.plot(*zip(*_smoothed(steps, SMOOTHED_STEPS), strict=True), label="wall time")
    cpu = [(each["step"], sum(each["cpu_seconds"].values())) for each in samples]
    bounds = [*range(0, steps[-1][0], 4 * SMOOTHED_STEPS), steps[-1][0]]
    slopes = [((low + high) / 2, _slope(cpu, low, high)) for low, high in itertools.pairwise(bounds)]
    seconds.plot(*zip(*slopes, strict=True), label="CPU time of all daemons")
    seconds.set(xlabel="step", ylabel="seconds per step", ylim=(0, None))
    seconds.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=Path("soak"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="relax-soak-"))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    make = [sys.executable, str(REPOSITORY / "recipes/quickstart/make_model.py"), str(folder / "quickstart" / "made")]
    subprocess.run(make, check=True, capture_output=True, timeout=300, env=env)
    shutil.copy(REPOSITORY / "recipes/quickstart.toml", folder / "quickstart.toml")
    settings = [f"total_steps={args.steps}", "samples_per_prompt=8", f"optimizer.lr={LEARNING_RATE}"]
    command = [
        *(sys.executable, "-m", "relaxd.ctl.main", "--runs-dir", str(folder / "runs"), "run"),
        *(str(folder / "quickstart.toml"), *(word for setting in settings for word in ("--set", setting))),
    ]
    with (args.out / "output").open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)
        try:
            samples = watch(process, folder / "runs")
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(120)
    if process.returncode != 0:
        print((args.out / "output").read_text(errors="replace")[-3000:])
        return 1
    lines = list(read_lines(next((folder / "runs").glob("*/metrics.jsonl"))))
    figures, faults = judge(samples, lines, args.steps)
    (args.out / "soak.json").write_text(
        json.dumps({"steps": args.steps, "figures": figures, "faults": faults}, indent=2)
    )
    (args.out / "samples.json").write_text(json.dumps(samples))
    plot(samples, lines, args.out / "soak.svg")
    for name, values in figures.items():
        print(f"{name:<12} " + "  ".join(f"{key} {value}" for key, value in values.items()))
    for fault in faults:
        print(f"fault: {fault}")
    shutil.rmtree(folder, ignore_errors=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
