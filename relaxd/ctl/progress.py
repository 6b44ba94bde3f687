"""Live progress of a run: a bar and one line of numbers in a terminal; in a pipe a line when something has changed."""

from __future__ import annotations

import re
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from relax.controller.v1 import controller_pb2

_WAITS_SHOWN = 4
_WAITS_IN_A_LINE = 2


class Progress:
    """Shows step, reward, staleness, tokens/s, version, rollbacks, what is dropped, and who waits for what."""

    def __init__(self, console: Console, run: controller_pb2.Run) -> None:
        self._console = console
        self._run = run
        self._live = Live(console=console, refresh_per_second=4, transient=False) if console.is_terminal else None
        self._shown: tuple[object, ...] = ()
        self._reason = ""
        self._rollbacks = len(run.rollbacks)
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
        """Show a note next to the waits until the run is shown again."""
        self._note = text
        self._show(self._run)

    def show(self, run: controller_pb2.Run) -> None:
        self._note = ""
        self._show(run)

    def _show(self, run: controller_pb2.Run) -> None:
        self._run = run
        for line in run.rollbacks[self._rollbacks :]:
            self._console.print(f"rollback: {line}", style="yellow", highlight=False, soft_wrap=True, markup=False)
        self._rollbacks = max(self._rollbacks, len(run.rollbacks))
        if self._live is not None:
            self._live.update(self._panel(run))
            return
        waits = [*list(run.waits)[:_WAITS_IN_A_LINE], *([self._note] if self._note else [])]
        # What a wait is for, without how long it has lasted: a line for each second would say nothing new.
        if waits:
            self._reason = re.sub(r"\d[\d.]*", "#", waits[0])
        shown = (run.state, run.head.lineage, run.head.number, self._reason)
        if shown != self._shown:
            self._shown = shown
            told = f"  [{'; '.join(waits)}]" if waits else ""
            self._console.print(numbers(run) + told, highlight=False, soft_wrap=True, markup=False)

    def _panel(self, run: controller_pb2.Run) -> Group:
        done = run.head.number if run.has_head else 0
        grid = Table.grid(padding=(0, 2))
        grid.add_row(ProgressBar(total=run.total_steps, completed=done, width=40), numbers(run))
        lines = [Text(f"  {wait}", style="dim") for wait in list(run.waits)[:_WAITS_SHOWN]]
        return Group(grid, *lines, *([Text(f"  {self._note}", style="yellow")] if self._note else []))


def numbers(run: controller_pb2.Run) -> str:
    """State, step, and the numbers of the newest step in one line."""
    state = controller_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_").lower()
    if not run.has_head:
        return state
    m = run.metrics
    parts = [f"{state} step {run.head.number}/{run.total_steps}"]
    for text, name in (("reward {:.3f}", "reward_mean"), ("staleness {:.0f}", "staleness_max")):
        if name in m:
            parts.append(text.format(m[name]))
    if m.get("tokens") and m.get("seconds_step"):
        parts.append(f"{m['tokens'] / m['seconds_step']:.0f} tokens/s")
    parts.append(f"version {run.head.lineage}.{run.head.number}")
    if run.rollbacks:
        parts.append(f"{len(run.rollbacks)} rollback{'s' if len(run.rollbacks) > 1 else ''}")
    return "  ".join(parts)
