"""Checks labels before anything starts: the reward itself reads each one, since an unreadable label teaches nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from relax_common.errors import InvalidInput
from relax_common.process.telemetry import get_logger
from relax_common.recipe import Recipe
from relaxd.data.row import PromptRow

UNREADABLE = "whose label the reward cannot read"
_WITHOUT_READER = ("exact", "reasoning_gym")
_SECONDS, _SECONDS_PER_LABEL = 60.0, 6.0
_EXIT_UNKNOWN_REWARD, _EXIT_NOT_INSTALLED = 2, 3
_SHOWN = 3


def readable_rows(recipe: Recipe, rows: Sequence[PromptRow]) -> list[PromptRow]:
    """Rows whose label the recipe's reward can read. If data.unreadable_label is "error", a label that it cannot read
    is refused with its line. A reward that does not exist is refused too.

    The reward runs in a separate process, because this daemon does not have its libraries. If they are not installed on
    this host, the rollout server checks the labels.
    """
    names = [*recipe.reward.parts] or [recipe.reward.name]
    if all(name in _WITHOUT_READER for name in names):
        return list(rows)
    labels = list(dict.fromkeys(row.label for row in rows if row.label is not None))
    faults = _read(recipe, labels)
    bad = [row for row in rows if row.label in faults]
    if bad and recipe.data.unreadable_label == "error":
        reasons = "; ".join(f"{row.where}: {faults[row.label or '']}" for row in bad[:_SHOWN])
        more = f"; {len(bad) - _SHOWN} more rows" if len(bad) > _SHOWN else ""
        raise InvalidInput(f"{reasons}{more}; data.unreadable_label = 'drop' leaves such rows out")
    return [row for row in rows if row.label not in faults]


def _read(recipe: Recipe, labels: Sequence[str]) -> dict[str, str]:
    """The reason why each unreadable label cannot be read."""
    spec = json.dumps(dict(recipe.reward.parts)) if recipe.reward.parts else recipe.reward.name
    try:
        done = subprocess.run(
            [sys.executable, "-m", "rollout_server.rewards.labels", spec],
            input=json.dumps(labels),
            capture_output=True,
            text=True,
            timeout=_SECONDS + _SECONDS_PER_LABEL * len(labels),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InvalidInput(f"reward {spec}: it did not read its {len(labels)} labels in time") from error
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    if done.returncode == _EXIT_UNKNOWN_REWARD:
        raise InvalidInput(f"reward: {last}")
    if done.returncode == _EXIT_NOT_INSTALLED:
        get_logger().warning("labels_unchecked", reason=last)
        return {}
    if done.returncode:
        raise InvalidInput(f"reward {spec}: reading its labels failed: {last}")
    found: dict[str, str] = json.loads(done.stdout)
    return found
