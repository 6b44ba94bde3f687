"""Checks labels before anything starts: the reward itself reads each one, since an unreadable label teaches nothing."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence

from relax_common.errors import InvalidInput
from relax_common.process.telemetry import get_logger
from relax_common.recipe import Recipe
from relaxd.data.row import PromptRow

UNREADABLE = "whose label the reward cannot read"
_WITHOUT_READER = ("exact", "reasoning_gym")
_SECONDS, _SECONDS_PER_LABEL, _SECONDS_MAX = 60.0, 0.02, 1800.0
"""How long all labels of a run may take: a reward that needs more would delay each start of the run."""
_START_SECONDS = 60.0
_STUCK_SECONDS = 10.0
"""The process itself ends a label after 5 s, except while code in C is at work."""
_STUCK_MAX = 3
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
    labels: dict[str, str] = {}
    for row in rows:
        if row.label is not None:
            labels.setdefault(row.label, row.where)
    faults = _read(recipe, labels)
    bad = [row for row in rows if row.label in faults]
    if bad and recipe.data.unreadable_label == "error":
        reasons = "; ".join(f"{row.where}: {faults[row.label or '']}" for row in bad[:_SHOWN])
        more = f"; {len(bad) - _SHOWN} more rows" if len(bad) > _SHOWN else ""
        raise InvalidInput(f"{reasons}{more}; data.unreadable_label = 'drop' leaves such rows out")
    return [row for row in rows if row.label not in faults]


def _read(recipe: Recipe, labels: Mapping[str, str]) -> dict[str, str]:
    """The reason why each unreadable label cannot be read. `labels` maps each one to where it is."""
    spec = json.dumps(dict(recipe.reward.parts)) if recipe.reward.parts else recipe.reward.name
    names, faults, stuck = list(labels), dict[str, str](), 0
    limit = min(_SECONDS + _SECONDS_PER_LABEL * len(names), _SECONDS_MAX)
    end, at = time.monotonic() + limit, 0
    while at < len(names):
        reasons = _Reasons(spec, names[at:], end)
        for reason in reasons:
            if reason:
                faults[names[at]] = reason
            at += 1
        if reasons.not_installed:
            get_logger().warning("labels_unchecked", reason=reasons.not_installed)
            return {}
        if at == len(names):
            break
        where = labels[names[at]]
        if time.monotonic() >= end:
            raise InvalidInput(
                f"{where}: reward {spec} should read this label next, but in {limit:.0f} s it has read only {at} of "
                f"{len(names)}; make its reader faster, or use fewer labels"
            )
        stuck += 1
        if stuck > _STUCK_MAX:
            raise InvalidInput(f"{where}: reward {spec} is stuck in this label, as in {_STUCK_MAX} before it")
        faults[names[at]] = f"it takes more than {_STUCK_SECONDS:.0f} s to read"
        at += 1
    return faults


class _Reasons:
    """What a process of its own says of each label, in order: why it cannot be read, or nothing. Ends before the first
    label in which the process is stuck, or when the time is over."""

    def __init__(self, spec: str, labels: Sequence[str], end: float) -> None:
        self._spec = spec
        self._labels = labels
        self._end = end
        self.not_installed = ""
        """What is missing on this host."""

    def __iter__(self) -> Iterator[str]:
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as told:
            given.write(json.dumps(self._labels).encode())
            given.seek(0)
            command = [sys.executable, "-m", "rollout_server.rewards.labels", self._spec]
            with subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, stderr=told) as process:
                try:
                    if not (yield from self._answers(process)):
                        return
                    code = process.wait(_START_SECONDS)
                finally:
                    process.kill()
            told.seek(0)
            last = (told.read().decode(errors="replace").strip().splitlines() or [f"exit status {code}"])[-1]
        if code == _EXIT_UNKNOWN_REWARD:
            raise InvalidInput(f"reward: {last}")
        if code == _EXIT_NOT_INSTALLED:
            self.not_installed = last
        elif code:
            raise InvalidInput(f"reward {self._spec}: reading its labels failed: {last}")

    def _answers(self, process: subprocess.Popen[bytes]) -> Generator[str, None, bool]:
        """Returns whether the process has closed its output. Its first line says that it has begun."""
        assert process.stdout is not None
        pipe, begun, rest = process.stdout.fileno(), False, b""
        while True:
            seconds = _STUCK_SECONDS if begun else _START_SECONDS
            left = self._end - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], min(seconds, left))[0]:
                if not begun and left > seconds:
                    raise InvalidInput(f"reward {self._spec}: it was not loaded within {seconds:.0f} s")
                return False
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                return True
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if begun:
                    yield json.loads(line)
                begun = True
