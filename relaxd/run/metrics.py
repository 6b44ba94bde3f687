"""Metrics of relaxd: what a run's newest step says, under bounded names."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Gauge

_VALUE = Gauge("relax_run_value", "Number of the newest committed step, by its name in metrics.jsonl", ["run", "name"])
_VERSION = Gauge("relax_run_version", "Newest committed version", ["run"])
_RESTARTS = Gauge("relax_run_restarts", "Times relaxd has started a role again", ["run", "instance"])
SHOWN = (
    "reward_mean",
    "loss",
    "grad_norm",
    "entropy",
    "staleness_max",
    "logprob_abs_diff_mean",
    "effective_sample_size",
    "kl_reference",
    "learning_rate",
    "tokens",
    "seconds_step",
    "seconds_wait",
    "seconds_train",
    "seconds_publish",
    "seconds_commit",
    "seconds_snapshot",
)


def show_run(run: str, version: int, values: Mapping[str, float], restarts: Mapping[str, int]) -> None:
    _VERSION.labels(run).set(version)
    for name in SHOWN:
        if name in values:
            _VALUE.labels(run, name).set(values[name])
    for instance, count in restarts.items():
        _RESTARTS.labels(run, instance).set(count)
