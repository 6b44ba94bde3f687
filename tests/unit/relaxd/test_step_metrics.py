"""One line per step, whichever of its two streams arrives first."""

from __future__ import annotations

from relax.dcs.v1 import dcs_pb2
from relaxd.run.step_metrics import StepMetrics


def commit(step: int, reward_trained: float) -> dcs_pb2.CommitRecord:
    record = dcs_pb2.CommitRecord(step=step, metrics={"reward_mean": reward_trained, "loss": float("nan")})
    record.version.number = step + 1
    return record


def completed(mean: float, samples: int = 8) -> dict[str, object]:
    return {"kind": "completed", "reward_mean": mean, "valid_samples": samples}


def head(version: int) -> dict[str, object]:
    return {"kind": "head", "lineage": 0, "version": version}


def test_the_reward_is_that_of_all_groups_generated_since_the_last_step() -> None:
    join = StepMetrics()
    join.see_event(completed(1.0, 6))
    join.see_event(completed(0.0, 2))
    join.see_event(head(1))
    assert join.take_ready() == []
    join.see_commit(3, commit(0, 0.5))
    (line,) = join.take_ready()
    assert (line["reward_mean"], line["reward_mean_trained"], line["groups_generated"]) == (0.75, 0.5, 2)
    assert "loss" not in line


def test_a_step_during_which_nothing_was_generated_keeps_the_last_reward() -> None:
    join = StepMetrics()
    join.see_event(completed(0.25))
    for step in (0, 1):
        join.see_event(head(step + 1))
        join.see_commit(step, commit(step, 0.5))
    assert [(line["step"], line["reward_mean"], line["groups_generated"]) for line in join.take_ready()] == [
        (0, 0.25, 1),
        (1, 0.25, 0),
    ]
