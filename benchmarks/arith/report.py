"""Runs side by side, as tables and as a curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.arith.ours import PHASES


def table(rows: list[dict[str, Any]], base_accuracy: float) -> Table:
    made = Table(
        title=f"One-digit addition, SmolLM2-135M-Instruct; greedy accuracy before training {base_accuracy:.2f}"
    )
    for name in ("run", "steps", "samples", "CPU s", "samples / CPU s", "reward, first -> last three", "greedy"):
        made.add_column(name, justify="left" if name == "run" else "right")
    for row in rows:
        cpu = row["cpu_seconds"]
        rewards = row["rewards"]
        made.add_row(
            row["name"],
            str(len(rewards)),
            str(row["samples"]),
            f"{cpu if isinstance(cpu, float) else sum(cpu.values()):.0f}",
            f"{row['samples_per_cpu_second']:.2f}",
            f"{rewards[0]:.3f} -> {sum(rewards[-3:]) / len(rewards[-3:]):.3f}",
            f"{row['greedy_accuracy']:.2f}",
        )
    return made


def phases(rows: list[dict[str, Any]]) -> Table:
    made = Table(
        "run", "steps/hour", "wall s", "tokens/s", *PHASES, "CPU s by component", title="Ours: median s per step"
    )
    for row in rows:
        cpu = ", ".join(f"{name} {used:.0f}" for name, used in row["cpu_seconds"].items() if used >= 0.5)
        seconds = [f"{row['phase_seconds'][phase]:.1f}" for phase in PHASES]
        made.add_row(
            row["name"],
            f"{row['steps_per_hour']:.0f}",
            f"{row['wall_seconds']:.0f}",
            f"{row['tokens'] / row['wall_seconds']:.1f}",
            *seconds,
            cpu,
        )
    return made


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Reward of each step over the CPU seconds spent until then, shared out evenly by wall time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="tight")
    axes = figure.subplots()
    for row in rows:
        ends, cpu = row["step_end_seconds"], row["cpu_seconds"]
        total = cpu if isinstance(cpu, float) else sum(cpu.values())
        axes.plot([total * end / ends[-1] for end in ends], row["rewards"], marker="o", markersize=3, label=row["name"])
    axes.set(xlabel="CPU seconds since the first lease", ylabel="mean reward", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
