"""The quick start under every algorithm: what each gains, with seeds and at several staleness bounds.

    python -m benchmarks.algorithms                              all, three seeds, max_staleness 0 and 1
    python -m benchmarks.algorithms --study staleness            which correction keeps learning how far off-policy
    python -m benchmarks.algorithms --algorithms gspo --seeds 1  one

Writes a table, the curves as JSON, and small multiples of the reward over steps as SVG. Runs that are in the JSON file
already are not repeated, so an interrupted study goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib import colormaps, rcParams
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from relaxd.run.files import read_lines

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes/quickstart.toml"
RUN_SECONDS = 1800.0
WINDOW_STEPS = 20
FORWARD = 'old_policy="actor_fwd"'

SECTIONS = {
    "grpo": ['algorithm={name="grpo"}'],
    "grpo actor_fwd": [f'algorithm={{name="grpo",{FORWARD}}}'],
    "grpo + TIS": [f'algorithm={{name="grpo",{FORWARD},correction="tis"}}'],
    "dr_grpo": ['algorithm={name="dr_grpo",aggregation_constant=3}'],
    "dapo": ['algorithm={name="dapo"}'],
    "maxrl": ['algorithm={name="maxrl"}'],
    "gdpo": ['algorithm={name="gdpo"}', "reward.parts={exact=1.0,numeric=0.5}"],
    "decoupled_ppo": ['algorithm={name="decoupled_ppo"}'],
    "opsm": ['algorithm={name="opsm"}'],
    "gspo": ['algorithm={name="gspo"}'],
    "gmpo": ['algorithm={name="gmpo"}'],
    "sapo": ['algorithm={name="sapo"}'],
    "cispo": ['algorithm={name="cispo",eps_high=0.28}'],
    "dppo_tv": ['algorithm={name="dppo_tv"}'],
    "m2po": ['algorithm={name="m2po"}'],
    "kl_cov": ['algorithm={name="kl_cov"}'],
    "clip_cov": ['algorithm={name="clip_cov"}'],
    "rloo": ['algorithm={name="rloo"}'],
    "reinforce_pp": ['algorithm={name="reinforce_pp"}'],
    "reinforce_pp_baseline": ['algorithm={name="reinforce_pp_baseline"}'],
    "ppo": ['algorithm={name="ppo"}', "critic.lr=5e-4"],
    "opd": ['algorithm={name="opd"}'],
}
"""What is set differently from the recipe."""

STUDY = ("grpo", "grpo + TIS", "decoupled_ppo", "cispo", "m2po")
STUDY_STALENESS = (0, 1, 2, 4, 8, 16)


def run(name: str, staleness: int, seed: int, steps: int, teacher: str) -> dict[str, Any]:
    """One run of the quick start; its curve and what it has gained."""
    settings = [*SECTIONS[name], f"max_staleness={staleness}", f"seed={seed}", f"total_steps={steps}"]
    if name == "opd":
        settings.append(f"teacher.path={teacher}")
    with tempfile.TemporaryDirectory(prefix="relax-algorithms-") as folder:
        words = [word for setting in settings for word in ("--set", setting)]
        done = subprocess.run(
            [sys.executable, "-m", "relaxd.ctl.main", "run", str(RECIPE), *words],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        if done.returncode:
            said = done.stdout[-2000:] + done.stderr[-2000:]
            raise SystemExit(f"{name} (max_staleness {staleness}, seed {seed}) ended with {done.returncode}:\n{said}")
        (metrics,) = Path(folder).glob("runs/*/metrics.jsonl")
        rewards = [line["reward_mean"] for line in read_lines(metrics)]
    first, last = fmean(rewards[:WINDOW_STEPS]), fmean(rewards[-WINDOW_STEPS:])
    return {"name": name, "staleness": staleness, "seed": seed, "first": first, "last": last, "rewards": rewards}


def wanted(options: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    names = STUDY if options.study else SECTIONS
    bounds: Sequence[int] = STUDY_STALENESS if options.study else (0, 1)
    if options.algorithms:
        names = [name.strip() for name in options.algorithms.split(",")]
    if options.staleness:
        bounds = [int(bound) for bound in options.staleness.split(",")]
    for seed in range(options.seeds):  # seed by seed, so that an interrupted study has all algorithms
        for name in names:
            for bound in bounds:
                if name != "opd" or options.teacher:
                    yield name, bound, seed


def table(runs: Sequence[dict[str, Any]]) -> Table:
    bounds = sorted({run["staleness"] for run in runs})
    shown = Table(title=f"Mean reward of the first and the last {WINDOW_STEPS} steps; ± over seeds (their number)")
    shown.add_column("algorithm")
    for bound in bounds:
        shown.add_column(f"max_staleness {bound}")
    for name in dict.fromkeys(run["name"] for run in runs):
        cells = []
        for bound in bounds:
            some = [run for run in runs if (run["name"], run["staleness"]) == (name, bound)]
            if not some:
                cells.append("")
                continue
            lasts = [run["last"] for run in some]
            spread = f" ± {stdev(lasts):.3f}" if len(lasts) > 1 else ""
            cells.append(f"{fmean(run['first'] for run in some):.3f} -> {fmean(lasts):.3f}{spread} ({len(lasts)})")
        shown.add_row(name, *cells)
    return shown


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Small multiples: reward over steps, a panel per algorithm, a colour per staleness bound, a line per seed."""
    names = list(dict.fromkeys(run["name"] for run in runs))
    bounds = sorted({run["staleness"] for run in runs})
    columns = min(5, len(names))
    rows = -(-len(names) // columns)
    rcParams["svg.fonttype"] = "none"  # text stays text, which keeps the file small
    figure = Figure(figsize=(2.2 * columns, 1.6 * rows + 0.5), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    colours = colormaps["viridis"]
    shown: dict[str, Any] = {}
    for panel in panels.flat[len(names) :]:
        panel.set_visible(False)
    for name, panel in zip(names, panels.flat, strict=False):
        for run in (run for run in runs if run["name"] == name):
            colour = colours(bounds.index(run["staleness"]) / max(1, len(bounds) - 1) * 0.8)
            steps = range(0, len(run["rewards"]), 2)
            smooth = [fmean(run["rewards"][max(0, i - 9) : i + 1]) for i in steps]
            (shown[f"max_staleness {run['staleness']}"],) = panel.plot(steps, smooth, color=colour, linewidth=0.8)
        panel.set_title(name, fontsize=8)
        panel.tick_params(labelsize=6)
    figure.legend(shown.values(), shown.keys(), fontsize=7, loc="outside upper right", ncols=len(shown))
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("reward, mean of 10 steps", fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=["staleness"], help="five corrections at six staleness bounds")
    parser.add_argument("--algorithms", default="", help="some of them, separated by commas")
    parser.add_argument("--staleness", default="", help="bounds, separated by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--teacher", default="", metavar="DIR", help="an exported folder; without it opd is left out")
    parser.add_argument(
        "--out", type=Path, default=Path("algorithms"), metavar="STEM", help="of the .json and .svg files"
    )
    options = parser.parse_args()
    stem = options.out.resolve()
    kept = stem.with_suffix(".json")
    runs: list[dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else []
    done = {(run["name"], run["staleness"], run["seed"]) for run in runs}
    todo = [each for each in wanted(options) if each not in done]
    console = Console(width=150)
    for name, bound, seed in track(todo, description="runs", console=console):
        runs.append(run(name, bound, seed, options.steps, options.teacher))
        kept.write_text(json.dumps(runs) + "\n")
    console.print(table(runs))
    plot(runs, stem.with_suffix(".svg"))


if __name__ == "__main__":
    main()
