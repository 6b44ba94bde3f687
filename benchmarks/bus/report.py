"""The figures of a comparison: as a table for people and as JSON."""

from __future__ import annotations

import statistics
from typing import Any

from rich.table import Table

from benchmarks.bus.cases import Case
from benchmarks.bus.measure import middle_and_spread, quantile
from benchmarks.bus.result import Repetition

TARGETS = {
    "shm": {"i": 8.0, "ii": 15.0, "iii": 15.0, "iv": 15.0},
    "grpc": {"i": 2.0, "ii": 1.5, "iii": 2.0, "iv": 2.0},
}
"""How many times less CPU per byte than the peer"""


def figures(case: Case, system: str, repetitions: list[Repetition], memory: float | None) -> dict[str, Any]:
    """Medians over repetitions; quantiles over all transfers."""
    trips = [seconds for r in repetitions for seconds in r.round_trips]
    puts = [seconds for r in repetitions for seconds in r.put_seconds]
    n_bytes = repetitions[0].n_bytes / len(repetitions[0].put_seconds)
    cpu, least, most = middle_and_spread([r.cpu_seconds_per_gb for r in repetitions])
    return {
        "case": case.name,
        "system": system,
        "gb_per_second": n_bytes / 1e9 / statistics.median(trips),
        "samples_per_second": case.samples / statistics.median(trips),
        "put_ms_p50": 1e3 * statistics.median(puts),
        "put_ms_p99": 1e3 * quantile(puts, 0.99),
        "round_trip_ms_p50": 1e3 * statistics.median(trips),
        "round_trip_ms_p99": 1e3 * quantile(trips, 0.99),
        "cpu_seconds_per_gb": cpu,
        "cpu_seconds_per_gb_range": [least, most],
        "memory_per_payload_byte": memory,
    }


def ratios(ours: list[Repetition], peer: list[Repetition]) -> dict[str, Any]:
    """How many times less CPU per byte, repetition by repetition, since they ran in turn."""
    each = [p.cpu_seconds_per_gb / o.cpu_seconds_per_gb for o, p in zip(ours, peer, strict=True)]
    middle, least, most = middle_and_spread(each)
    return {"less_cpu": middle, "less_cpu_range": [least, most]}


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table(title="Put and get of one batch; CPU of all processes that move rows")
    for name in ("case", "system", "GB/s", "samples/s", "put p50 / p99 ms", "put + get p50 / p99 ms", "CPU s/GB",
                 "less CPU than peer", "target", "memory / payload"):  # fmt: skip
        made.add_column(name, justify="left" if name in ("case", "system") else "right")
    for row in rows:
        target = TARGETS.get(row["system"], {}).get(row["case"])
        memory, least_most = row["memory_per_payload_byte"], row.get("less_cpu_range")
        made.add_row(
            row["case"],
            row["system"],
            f"{row['gb_per_second']:.3f}",
            f"{row['samples_per_second']:,.0f}",
            f"{row['put_ms_p50']:.1f} / {row['put_ms_p99']:.1f}",
            f"{row['round_trip_ms_p50']:.1f} / {row['round_trip_ms_p99']:.1f}",
            f"{row['cpu_seconds_per_gb']:.2f} ({' - '.join(f'{v:.2f}' for v in row['cpu_seconds_per_gb_range'])})",
            f"{row['less_cpu']:.1f} x ({' - '.join(f'{v:.1f}' for v in least_most)})" if least_most else "",
            f">= {target:g} x" if target and least_most else "",
            "" if memory is None else f"{memory:.2f}",
        )
    return made
