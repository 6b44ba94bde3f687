"""What the daemons add to a step: the quick start through relaxctl, against the same work by direct calls.

python -m benchmarks.step_overhead --material recipes/quickstart/made --steps 60
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from relax_common.recipe import load_recipe
from relaxd.run.files import read_lines

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 10
PHASES = ("wait", "train", "publish", "snapshot", "commit")


def overrides(material: Path, steps: int, staleness: int) -> list[str]:
    return [
        f"total_steps={steps}",
        f"max_staleness={staleness}",
        f"model.path={material / 'model'}",
        f"data.path={material / 'data.jsonl'}",
        "reward.name=benchmarks.coin_reward:coin",
    ]


def through_daemons(material: Path, steps: int, staleness: int) -> list[dict[str, Any]]:
    """metrics.jsonl of a run."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [word for each in overrides(material, steps, staleness) for word in ("--set", each)]
        command = [sys.executable, "-m", "relaxd.ctl.main", "--runs-dir", folder, "run"]
        subprocess.run(
            [*command, str(ROOT / "recipes/quickstart.toml"), *settings],
            check=True,
            timeout=580,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )
        return list(read_lines(next(Path(folder).glob("*")) / "metrics.jsonl"))


def by_direct_calls(material: Path, steps: int) -> list[Any]:
    from benchmarks.direct_loop import one_process

    recipe = load_recipe(ROOT / "recipes/quickstart.toml", overrides(material, steps, 0))
    with one_process(recipe) as loop:
        return list(loop.steps(steps))


def median_ms(values: list[float]) -> float:
    return 1000 * statistics.median(values[WARM_UP_STEPS:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--material", type=Path, default=ROOT / "recipes/quickstart/made")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    material = args.material.resolve()
    direct = by_direct_calls(material, args.steps)
    result: dict[str, dict[str, float]] = {
        "direct": {
            "step": median_ms([each.step for each in direct]),
            "generate": median_ms([each.generate for each in direct]),
            "train": median_ms([each.train for each in direct]),
            "swap": median_ms([each.swap for each in direct]),
        }
    }
    for staleness in (0, 1):
        lines = through_daemons(material, args.steps, staleness)
        ends = [line["train_end_unix_seconds"] for line in lines]
        result[f"max_staleness={staleness}"] = {
            "step": median_ms([0.0, *(b - a for a, b in itertools.pairwise(ends))]),
            **{phase: median_ms([line.get(f"seconds_{phase}", 0.0) for line in lines]) for phase in PHASES},
        }
    for name in ("max_staleness=0", "max_staleness=1"):
        result[name]["added"] = result[name]["step"] - result["direct"]["step"]
    columns = ("step", "added", "generate", "wait", "train", "swap", "publish", "snapshot", "commit")
    table = Table("median ms per step", *columns)
    for name, row in result.items():
        table.add_row(name, *(f"{row[column]:.1f}" if column in row else "" for column in columns))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
