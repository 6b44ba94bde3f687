"""What the report of a run says about its rewards and its rollbacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_common.recipe import load_recipe
from relaxd.run.summary import rollbacks, summarize, write_summary

RECIPE = load_recipe(Path(__file__).parents[3] / "recipes" / "quickstart.toml")


def rewards(count: int) -> list[dict[str, Any]]:
    return [{"step": step, "reward_mean": float(step)} for step in range(count)]


@pytest.mark.parametrize(
    ("steps", "window", "first", "last"),
    [
        (1, 0, 0.0, 0.0),
        (2, 1, 0.0, 1.0),
        (7, 3, 1.0, 5.0),
        (39, 19, 9.0, 29.0),
        (40, 20, 9.5, 29.5),
        (100, 20, 9.5, 89.5),
    ],
)
def test_the_first_and_the_last_steps_of_a_run_never_overlap(
    steps: int, window: int, first: float, last: float
) -> None:
    summary = summarize([], rewards(steps), RECIPE)
    assert summary["reward_window"] == window
    assert 2 * window <= steps
    assert summary["reward_last"] == last
    assert not window or summary["reward_first"] == first


def dcs(kind: str, **detail: Any) -> dict[str, Any]:
    return {"source": "dcs", "revision": 1, "time": 1.0, "kind": kind, **detail}


def test_each_rollback_is_told_with_its_reason(tmp_path: Path) -> None:
    events = [
        dcs("commit", lineage=0, version=4, metrics={}),
        # As the JSON form of the record has it: 64-bit numbers are text, a 0 is left out.
        dcs("rollback", lineage="1", head="3", reason="rows of step 3 are gone"),
        dcs("commit", lineage=1, version=4, metrics={}),
        dcs("rollback", lineage="2", reason="<everything> is gone"),
    ]
    told = [
        "from version 0.4 back to 1.3, 1 steps are repeated: rows of step 3 are gone",
        "from version 1.4 back to 2.0, 4 steps are repeated: <everything> is gone",
    ]
    assert rollbacks(events) == told
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "recipe.toml").touch()
    assert write_summary(tmp_path, RECIPE)["rollbacks"] == told
    assert "&lt;everything&gt; is gone" in (tmp_path / "report.html").read_text()
