"""summary.json and the report of a run, from its event and metrics files alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from relax_common.recipe import Recipe
from relax_common.versions import PolicyVersion
from relaxd.run.files import read_lines
from relaxd.run.ledger import audit
from relaxd.run.report import write_report

Interval = tuple[float, float]
WINDOW_STEPS = 20
"""Number of steps at the beginning and at the end whose mean rewards are compared; half of the run if it is shorter."""


def write_summary(run_dir: Path, recipe: Recipe) -> dict[str, Any]:
    """Writes summary.json, report.html and the plots; returns the summary."""
    events = list(read_lines(run_dir / "events.jsonl"))
    lines = list(read_lines(run_dir / "metrics.jsonl"))
    summary = summarize(events, lines, recipe)
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    write_report(run_dir, summary, lines, recipe)
    return summary


def summarize(events: Sequence[dict[str, Any]], lines: Sequence[dict[str, Any]], recipe: Recipe) -> dict[str, Any]:
    """Numbers of a whole run; shares are of samples and of wall time."""
    result = audit(events, ended=False, max_staleness=recipe.max_staleness)
    rewards = [line["reward_mean"] for line in lines if "reward_mean" in line]
    window = min(WINDOW_STEPS, len(rewards) // 2)
    wall = events[-1]["time"] - events[0]["time"] if events else 0.0
    samples = sum(line.get("samples", 0) for line in lines)
    tokens = sum(line.get("tokens", 0) for line in lines)
    stale = sum(value for line in lines for name, value in line.items() if _stale_bucket(name))
    counts = result.counts
    return {
        "steps": len(lines),
        # The two windows never overlap; with a single step there is nothing to compare.
        "reward_window": window,
        "reward_first": _mean(rewards[:window]),
        "reward_last": _mean(rewards[-window:]),
        "wall_seconds": wall,
        "cpu_seconds": sum(line.get("cpu_seconds", 0.0) for line in lines),
        "samples": samples,
        "tokens": tokens,
        "tokens_per_second": tokens / wall if wall else 0.0,
        "groups_admitted": counts["admitted"],
        "groups_trained": counts.get("trained", 0),
        "groups_dropped": counts.get("dropped", 0),
        "groups_dropped_by_reason": result.dropped_by_reason,
        "groups_returned": counts.get("returned", 0),
        "groups_rolled_back": counts["rolled_back_ever"],
        "rollbacks": rollbacks(events),
        "leases_lost": counts["leases_lost"],
        "max_staleness_seen": result.max_staleness,
        "share_stale": stale / samples if samples else 0.0,
        "overlap_share": overlap_share(events),
        "ledger_faults": list(result.faults),
    }


def rollbacks(events: Iterable[dict[str, Any]]) -> list[str]:
    """Each ROLLBACK of the commit log in one line: what was given up, and why."""
    lines = []
    before: PolicyVersion | None = None
    for event in events:
        if event["source"] != "dcs":
            continue
        if event["kind"] == "commit":
            before = PolicyVersion(event["lineage"], event["version"])
        elif event["kind"] == "rollback":
            now = PolicyVersion(int(event["lineage"]), int(event.get("head", 0)))
            lines.append(rollback_line(before or now, now, event.get("reason", "")))
            before = now
    return lines


def rollback_line(before: PolicyVersion, now: PolicyVersion, reason: str) -> str:
    return f"from version {before} back to {now}, {max(0, before.number - now.number)} steps are repeated: {reason}"


def overlap_share(events: Sequence[dict[str, Any]]) -> float:
    """Share of the time from first to last training during which generation and training ran at the same time."""
    training = [
        (event["metrics"]["train_start_unix_seconds"], event["metrics"]["train_end_unix_seconds"])
        for event in events
        if event["kind"] == "commit" and "train_start_unix_seconds" in event.get("metrics", {})
    ]
    generation = [
        (event["generation_start"], event["generation_end"]) for event in events if event["kind"] == "completed"
    ]
    if not training:
        return 0.0
    wall = max(end for _, end in training) - min(start for start, _ in training)
    return _length_of_intersection(_union(training), _union(generation)) / wall if wall > 0 else 0.0


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length_of_intersection(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def _stale_bucket(name: str) -> bool:
    return name.startswith("staleness_samples_") and name != "staleness_samples_0"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
