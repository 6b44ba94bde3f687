"""SmolLM2 learns one-digit addition: ours against TRL's GRPOTrainer, the same task, model, batch and learning rate.

make sglang smollm2-model                                             # what it needs
python -m benchmarks.trl_smollm2                                      # TRL, then ours with SGLang and two actor ranks
python -m benchmarks.trl_smollm2 --runs dp1,dp1-on-policy --peer-steps 0

Compare CPU seconds and what is learned, not wall time: TRL is one process, ours run side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.arith.greedy import accuracy
from benchmarks.arith.ours import RECIPE, ROOT, run_recipe, steps_per_hour
from benchmarks.arith.report import phases, plot, table
from benchmarks.peer_environment import environment

VERSION = "1.16.0"
MICRO_BATCH = 16
PEER_SECONDS = 7200.0
RUNS: dict[str, list[str]] = {
    "dp2": [],
    "dp1": ["actor.data_parallel_size=1"],
    "dp1-on-policy": ["actor.data_parallel_size=1", "max_staleness=0"],
    "dp2-on-policy": ["max_staleness=0"],
    "coin": ["reward.name=benchmarks.coin_reward:coin"],
    "coin-on-policy": ["reward.name=benchmarks.coin_reward:coin", "max_staleness=0"],
    "torch": ["rollout.engine=torch", "rollout.engine_python=", "actor.data_parallel_size=1"],
}
"""What is set differently from the recipe. With a coin for a reward every group has signal: each step is then the same
work at any staleness."""


def peer(python: Path, model: Path, data: Path, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as out:
        script = ROOT / "benchmarks/arith/trl_peer.py"
        rate = tomllib.loads(RECIPE.read_text())["optimizer"]["lr"]
        run = subprocess.run(
            [python, script, model, data, out, str(steps), str(MICRO_BATCH), str(rate)],
            stdout=subprocess.PIPE,
            timeout=PEER_SECONDS,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
        )
        found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
        return {
            **found,
            "name": f"TRL {VERSION}",
            "samples_per_cpu_second": found["samples"] / found["cpu_seconds"],
            "greedy_accuracy": accuracy(Path(out), data),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--material", type=Path, default=ROOT / "recipes/smollm2/made", metavar="DIR")
    parser.add_argument("--runs", default="dp2", help=f"of ours, some of {','.join(RUNS)}")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--peer-steps", type=int, default=15, help="of TRL; 0 leaves it out")
    parser.add_argument("--peer-env", type=Path, default=Path.home() / ".cache/relax/trl", metavar="DIR")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="reward over CPU seconds, as SVG or PNG")
    options = parser.parse_args()
    console = Console(width=180)
    model, data = (options.material / "model").resolve(), (options.material / "data.jsonl").resolve()
    options.runs_dir.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    if options.peer_steps:
        python = environment(options.peer_env, [f"trl=={VERSION}", "torch"])
        rows.append(peer(python, model, data, options.peer_steps))
    ours = []
    for name in filter(None, options.runs.split(",")):
        settings = [f"total_steps={options.steps}", *RUNS[name]]
        outcome = run_recipe(name, settings, options.runs_dir.resolve(), model, data)
        ours.append(outcome.to_json() | {"steps_per_hour": steps_per_hour(outcome)})
    rows += ours
    console.print(table(rows, accuracy(model, data)))
    if ours:
        console.print(phases(ours))
    if options.plot is not None:
        plot(rows, options.plot)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
