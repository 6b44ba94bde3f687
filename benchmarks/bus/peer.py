"""TransferQueue in its own environment, made on demand."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bus.cases import Case
from benchmarks.bus.result import Repetition
from relax_common.process.tuning import SETTING

VERSION = "0.1.11"
HERE = Path(__file__).parent
LAST_LINES = 20
ANSWER_SECONDS = 600.0
"""A repetition takes seconds; one that takes longer than this hangs, and is killed."""


class TransferQueue:
    """A process that drives TransferQueue's writer and reader."""

    def __init__(self, python: Path) -> None:
        self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `stop`
        self._process = subprocess.Popen(
            [python, HERE / "transferqueue_peer.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
            # It must not inherit our Python path and our gRPC settings.
            env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", SETTING)},
        )
        self._receive()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        # It sends one line per question, so nothing stays in the reader's buffer where `select` would not see it.
        if not select.select([self._process.stdout], [], [], ANSWER_SECONDS)[0]:
            self._process.kill()
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._words.seek(0)
            last = "".join(self._words.readlines()[-LAST_LINES:])
            raise SystemExit(f"{last}queue_bench: TransferQueue ended with {code}; its last words are above")
        return json.loads(line)

    def _ask(self, **told: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def repetition(self, case: Case, warm_up: int) -> Repetition:
        return Repetition(**self._ask(what="repetition", case=case.name, warm_up=warm_up))

    def memory_ratio(self, case: Case) -> float:
        return float(self._ask(what="memory", case=case.name)["ratio"])

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._words.close()
