"""A reward that never works ends the run with its reason; it is neither a reward of 0 nor a wait without end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("broken_reward:raises", "RuntimeError: the grader is broken"),
        ("nosuch", "no reward 'nosuch': known: exact, numeric"),
    ],
)
def test_I11_a_reward_that_never_works_ends_the_run_by_name(
    start_run: Callable, tmp_path: Path, reward: str, words: str
) -> None:
    (tmp_path / "broken_reward.py").write_text("def raises(item):\n    raise RuntimeError('the grader is broken')\n")
    run: Any = start_run(
        "",
        f"reward.name={reward}",
        "prompts_per_step=2",
        "samples_per_prompt=2",
        PYTHONPATH=str(tmp_path),
    )
    assert run.process.wait(120) == 1, run.explain()
    assert "run failed" in run.output()
    assert words in " ".join(run.output().split())
    assert not any(event["kind"] == "trained" for event in run.events())
    assert (run.run_dir / "summary.json").exists()
