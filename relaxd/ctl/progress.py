"""Live progress of a run: a bar and one line of numbers in a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from relax.controller.v1 import controller_pb2

_LINE_SECONDS = 2.0
"""Between lines where the output is no terminal."""


class Progress:
    """Shows step, reward, staleness, tokens/s, version, and who waits for what."""

    def __init__(self, console: Console, run: controller_pb2.Run) -> None:
        self._console = console
        self._run = run
        self._live = Live(console=console, refresh_per_second=4, transient=False) if console.is_terminal else None
        self._last_line_at = 0.0
        self._note = ""

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        self.show(self._run)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        self._note = text
        self.show(self._run)

    def show(self, run: controller_pb2.Run) -> None:
        self._run = run
        if self._live is not None:
            self._live.update(self._panel(run))
            return
        now = time.monotonic()
        ended = run.state in (controller_pb2.RUN_STATE_ENDED, controller_pb2.RUN_STATE_FAILED)
        if now - self._last_line_at >= _LINE_SECONDS or ended:
            self._last_line_at = now
            self._console.print(_numbers(run) + _waits(run, self._note), highlight=False, soft_wrap=True)
            self._note = ""

    def _panel(self, run: controller_pb2.Run) -> Group:
        done = run.head.number if run.has_head else 0
        grid = Table.grid(padding=(0, 2))
        grid.add_row(ProgressBar(total=run.total_steps, completed=done, width=40), _numbers(run))
        lines = [Text(f"  {wait}", style="dim") for wait in list(run.waits)[:4]]
        return Group(grid, *lines, *([Text(f"  {self._note}", style="yellow")] if self._note else []))


def _numbers(run: controller_pb2.Run) -> str:
    state = controller_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_").lower()
    if not run.has_head:
        return f"{state}"
    m = run.metrics
    parts = [f"{state} step {run.head.number}/{run.total_steps}"]
    for text, name in (("reward {:.3f}", "reward_mean"), ("staleness {:.0f}", "staleness_max")):
        if name in m:
            parts.append(text.format(m[name]))
    if m.get("tokens") and m.get("seconds_step"):
        parts.append(f"{m['tokens'] / m['seconds_step']:.0f} tokens/s")
    parts.append(f"version {run.head.lineage}.{run.head.number}")
    return "  ".join(parts)


def _waits(run: controller_pb2.Run, note: str) -> str:
    words = [*list(run.waits)[:2], *([note] if note else [])]
    return f"  [{'; '.join(words)}]" if words else ""
