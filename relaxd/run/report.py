"""report.html and its plots: reward, staleness, phase times."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_common.recipe import Recipe

_PHASES = ("wait", "train", "publish", "snapshot", "commit")
_STALENESS = "staleness_samples_"


def write_report(run_dir: Path, summary: dict[str, Any], lines: Sequence[dict[str, Any]], recipe: Recipe) -> None:
    """Writes plots as PNG files, next to one HTML file that embeds them."""
    plots = _plots(run_dir, lines) if lines else []
    images = "".join(
        f'<figure><img alt="{path.stem}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        for path, caption in plots
    )
    rows = "".join(f"<tr><th>{html.escape(key)}</th><td>{_shown(value)}</td></tr>" for key, value in summary.items())
    page = (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f"<title>{html.escape(run_dir.name)}</title><style>"
        "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
        "table{border-collapse:collapse}th{text-align:left;font-weight:600;padding:.15rem 1.5rem .15rem 0}"
        "figure{margin:2rem 0}img{max-width:100%}figcaption{color:#666}pre{background:#f6f6f6;padding:1rem}</style>"
        f"<h1>{html.escape(run_dir.name)}</h1>{images}<h2>Summary</h2><table>{rows}</table>"
        f"<h2>Recipe</h2><pre>{html.escape((run_dir / 'recipe.toml').read_text())}</pre></html>"
    )
    (run_dir / "report.html").write_text(page)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "<br>".join(html.escape(str(each)) for each in value) or "none"
    return html.escape(str(value))


def _plots(run_dir: Path, lines: Sequence[dict[str, Any]]) -> list[tuple[Path, str]]:
    # Imported here and not above: the import takes half a second, which other commands should not pay.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    steps = [line["step"] for line in lines]
    plots = []

    figure = Figure(figsize=(8, 3.2), layout="tight")
    axes = figure.subplots()
    rewards = [line.get("reward_mean", float("nan")) for line in lines]
    axes.plot(steps, rewards, color="#9ecae1", linewidth=0.8, label="step")
    axes.plot(steps, _moving_mean(rewards, 20), color="#08519c", label="mean of 20")
    axes.set(xlabel="step", ylabel="reward", ylim=(min(0.0, *_finite(rewards)), None))
    axes.legend(frameon=False)
    plots.append((_saved(figure, run_dir / "reward.png"), "Mean reward of all groups generated per step"))

    figure = Figure(figsize=(8, 3.2), layout="tight")
    axes = figure.subplots()
    histogram = _staleness(lines)
    axes.bar(list(histogram), list(histogram.values()), color="#08519c")
    axes.set(xlabel="staleness (versions)", ylabel="samples", xticks=list(histogram))
    plots.append((_saved(figure, run_dir / "staleness.png"), "Samples trained, by staleness"))

    figure = Figure(figsize=(8, 3.2), layout="tight")
    axes = figure.subplots()
    series = [[line.get(f"seconds_{phase}", 0.0) for line in lines] for phase in _PHASES]
    axes.stackplot(steps, series, labels=_PHASES)
    axes.set(xlabel="step", ylabel="seconds")
    axes.legend(frameon=False, ncols=len(_PHASES), fontsize=8)
    plots.append((_saved(figure, run_dir / "phases.png"), "Seconds of the actor per step, by phase"))
    return plots


def _saved(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=110)
    return path


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if value == value] or [0.0]


def _moving_mean(values: Sequence[float], window: int) -> list[float]:
    means = []
    for end in range(1, len(values) + 1):
        part = _finite(values[max(0, end - window) : end])
        means.append(sum(part) / len(part))
    return means


def _staleness(lines: Sequence[dict[str, Any]]) -> dict[int, float]:
    histogram: dict[int, float] = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith(_STALENESS):
                bucket = int(name.removeprefix(_STALENESS))
                histogram[bucket] = histogram.get(bucket, 0.0) + value
    return dict(sorted(histogram.items())) or {0: 0.0}
