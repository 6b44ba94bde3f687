"""A reward that never works ends the run with its reason; this is neither a reward of 0 nor an endless wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

SMALL = ("prompts_per_step=2", "samples_per_prompt=2")


def test_I11_a_reward_that_never_works_ends_the_run_by_name(start_run: Callable, tmp_path: Path) -> None:
    (tmp_path / "broken_reward.py").write_text("def raises(item):\n    raise RuntimeError('the grader is broken')\n")
    run: Any = start_run("", "reward.name=broken_reward:raises", *SMALL, PYTHONPATH=str(tmp_path))
    assert run.process.wait(120) == 1, run.explain()
    assert "run failed" in run.output()
    assert "RuntimeError: the grader is broken" in " ".join(run.output().split())
    assert not any(event["kind"] == "trained" for event in run.events())
    assert (run.run_dir / "summary.json").exists()


def test_a_reward_that_does_not_exist_is_refused_before_anything_starts(start_run: Callable) -> None:
    run: Any = start_run("", "reward.name=nosuch", *SMALL)
    assert run.process.wait(120) == 1, run.explain()
    assert "no reward 'nosuch': known: exact, numeric" in " ".join(run.output().split())
    assert not (run.folder / "runs").exists()


def test_equal_rewards_are_named_meanwhile_and_end_the_run_with_the_reason(start_run: Callable, tmp_path: Path) -> None:
    (tmp_path / "equal_reward.py").write_text("def same(item):\n    return 1.0\n")
    limits = ("total_steps=3", "dropped_steps_max=40")
    run: Any = start_run("", "reward.name=equal_reward:same", *limits, *SMALL, PYTHONPATH=str(tmp_path))
    assert run.process.wait(200) == 1, run.explain()
    said = " ".join(run.output().split())
    assert "dropped since the last one: " in said, "the progress line names what is dropped"
    assert "groups in a row were dropped and none was trained" in said
    assert "no_signal" in said.partition("run failed")[2]
    assert not any(event["kind"] == "trained" for event in run.events())
