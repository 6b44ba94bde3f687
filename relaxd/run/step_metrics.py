"""One line of metrics per step: what the actor measured, with the rewards of all groups generated during the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Gauge

from relax.dcs.v1 import dcs_pb2

_VALUE = Gauge("relax_run_value", "Metric of the newest committed step, named as in metrics.jsonl", ["run", "name"])
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


@dataclass
class StepMetrics:
    """Joins two streams: queue events (groups completed, head moved) and commit records.

    `reward_mean` is over all groups completed since the head last moved, including those without signal. If there were
    none (the step's groups were generated earlier), it is that of the step before. The actor's own mean, over what it
    trained, stays as `reward_mean_trained`.
    """

    _reward_mean: float = 0.0
    _rewards: list[tuple[float, int]] = field(default_factory=list)
    _rewards_of: dict[tuple[int, int], list[tuple[float, int]]] = field(default_factory=dict)
    _commits: dict[tuple[int, int], tuple[int, dcs_pb2.CommitRecord]] = field(default_factory=dict)

    def see_event(self, event: dict[str, Any]) -> None:
        """A queue event, in order."""
        if event["kind"] == "completed" and event.get("reward_mean") is not None:
            self._rewards.append((event["reward_mean"], event["valid_samples"]))
        elif event["kind"] == "head" and not event.get("rollback"):
            self._rewards_of[event["lineage"], event["version"]] = self._rewards
            self._rewards = []

    def see_commit(self, revision: int, record: dcs_pb2.CommitRecord) -> None:
        self._commits[record.version.lineage, record.version.number] = (revision, record)

    def take_ready(self) -> list[dict[str, Any]]:
        """Lines for which both the commit and the head event have been seen, in order of version."""
        lines = []
        for key in sorted(self._commits.keys() & self._rewards_of.keys()):
            revision, record = self._commits.pop(key)
            rewards = self._rewards_of.pop(key)
            samples = sum(count for _, count in rewards)
            if samples:
                self._reward_mean = sum(mean * count for mean, count in rewards) / samples
            if record.HasField("step"):
                lines.append(_line(revision, record, self._reward_mean, len(rewards)))
        return lines


def _line(revision: int, record: dcs_pb2.CommitRecord, reward_mean: float, groups_generated: int) -> dict[str, Any]:
    measured = {name: value for name, value in record.metrics.items() if math.isfinite(value)}
    if "reward_mean" in measured:
        measured["reward_mean_trained"] = measured.pop("reward_mean")
    measured["reward_mean"] = reward_mean
    measured["groups_generated"] = groups_generated
    return {
        "dcs_revision": revision,
        "step": record.step,
        "lineage": record.version.lineage,
        "version": record.version.number,
        "groups": len(record.groups),
        **measured,
    }


def show_run(run: str, version: int, values: Mapping[str, float], restarts: Mapping[str, int]) -> None:
    _VERSION.labels(run).set(version)
    for name in SHOWN:
        if name in values:
            _VALUE.labels(run, name).set(values[name])
    for instance, count in restarts.items():
        _RESTARTS.labels(run, instance).set(count)
