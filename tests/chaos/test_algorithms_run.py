"""Algorithms that need more than a chunk of rows, as real runs: whole steps, parts of a reward, updates, a teacher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from relaxd.run.files import read_lines

STEPS = 8


def metrics(run: Any) -> list[dict[str, float]]:
    return list(read_lines(run.run_dir / "metrics.jsonl"))


def test_gdpo_trains_on_the_parts_of_a_reward_and_long_answers_are_penalised(start_run: Callable) -> None:
    run = start_run(
        "",
        'algorithm={name="gdpo"}',
        "reward.parts={exact=1.0,numeric=0.5}",
        "reward.overlong_tokens=1",
    )
    run.finish()
    dropped = [event for event in run.events() if event["kind"] == "dropped"]
    assert not [event for event in dropped if "no_signal" in str(event)], "equal sums may hide unequal parts"
    assert min(line["reward_mean"] for line in metrics(run)) < 0, "an answer without an end is penalised"
    assert all(line["grad_norm"] > 0 for line in metrics(run))


def test_reinforce_pp_learns_from_single_samples_with_a_kl_in_the_reward(start_run: Callable) -> None:
    run = start_run(
        "reference.after_write=kill@3",
        'algorithm={name="reinforce_pp",kl_reward_coef=0.01}',
        "samples_per_prompt=1",
        "min_valid_samples=1",
    )
    run.finish()
    assert run.fired_points() == {"reference.after_write"}
    assert len(metrics(run)) == STEPS
    assert all(line["grad_norm"] > 0 for line in metrics(run))


def test_several_updates_and_passes_select_their_tokens_over_all_ranks(start_run: Callable) -> None:
    run = start_run(
        "actor.after_optimizer_step=kill@3",
        'algorithm={name="m2po",updates_per_step=2,passes_per_step=2,second_moment_max=1e-4}',
        "actor.data_parallel_size=2",
    )
    result = run.finish()
    lines = metrics(run)
    assert result.counts["rolled_back_ever"] == 0
    assert any(line["ratio_max"] > 1.0001 for line in lines), "a second pass is off-policy"
    assert [line["updates"] for line in lines] == [4.0] * STEPS


@pytest.mark.parametrize("how", ["advantage", "loss"])
def test_a_policy_is_distilled_from_a_teacher_that_dies_in_between(start_run: Callable, how: str) -> None:
    """The teacher is the model that the policy starts from: the longer it is trained, the more they differ."""
    run = start_run(
        "teacher.after_write=kill@4",
        f'algorithm={{name="opd",distill_as="{how}",reward_advantages=true}}',
        "teacher.path=quickstart/made/model",
    )
    result = run.finish()
    assert run.fired_points() == {"teacher.after_write"}
    assert result.counts["rolled_back_ever"] == 0
    assert len(metrics(run)) == STEPS
