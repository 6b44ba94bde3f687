"""A role's processes under supervision: all ranks together, restarted together under a new incarnation.

| seen | done |
|---|---|
| a process exits 0 and the role may end | the role has finished |
| a process exits with EXIT_BAD_CONFIG | the role has failed: starting again cannot help |
| a process exits otherwise | the other ranks are killed; after a back-off all start again |
| heartbeats stop (frozen, cut off) | the same, but the silent process is left to its fencing |
| the restart budget is used up without progress in between | the role has failed, with the last words of its log |

If the launcher does not own the processes, only the first row and the event of the fourth apply: restarting a process
is left to the system that started it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from relax_common.process.config import EXIT_BAD_CONFIG
from relaxd.launch.launcher import Launcher, Process, ProcessSpec
from relaxd.launch.local import last_line

BACKOFF_SECONDS = (0.1, 0.5, 1.0, 2.0, 4.0)
"""Seconds to wait before each restart; one entry per restart allowed without progress in between."""
STOP_GRACE_SECONDS = 20.0
OnEvent = Callable[[str, dict[str, object]], None]


class Supervisor:
    """`on_event` is told what happens to the role, for the controller's events."""

    def __init__(
        self, specs: Sequence[ProcessSpec], launcher: Launcher, *, ends_by_itself: bool, on_event: OnEvent
    ) -> None:
        self.instance = specs[0].instance
        self.restarts = 0
        self._specs = specs
        self._launcher = launcher
        self._ends_by_itself = ends_by_itself
        self._on_event = on_event
        self._processes: list[Process] = []
        self._abandoned: list[Process] = []
        self._goodbyes: list[asyncio.Task[None]] = []
        self._silent = asyncio.Event()
        self._silent_ranks: set[int] = set()
        self._stopping = False
        self._failures_in_a_row = 0

    async def run(self) -> str:
        """Run until the role has finished or was stopped (returns ''), or has failed (returns the reason)."""
        while not self._stopping:
            if not self._processes:
                await self._start()
            rank = await self._first_end()
            if self._stopping:
                break
            ended = self._processes[rank]
            if not ended.running and ended.exit_code == 0 and self._ends_by_itself:
                await self._await_others()
                return ""
            why = "its heartbeats stopped" if ended.running else f"exit {ended.exit_code}"
            self._on_event("daemon_lost", {"instance": self.instance, "rank": rank, "why": why})
            if not self._launcher.owns_processes:
                self._hear_again()
                continue
            await self._clear()
            words = last_line(self._specs[rank].log_path)
            if ended.exit_code == EXIT_BAD_CONFIG:
                return words
            if self._failures_in_a_row >= len(BACKOFF_SECONDS):
                return (
                    f"{self.instance} rank {rank} ended {self._failures_in_a_row + 1} times in a row ({why}): {words}"
                )
            await asyncio.sleep(BACKOFF_SECONDS[self._failures_in_a_row])
            self._failures_in_a_row += 1
            self.restarts += 1
        return ""

    def progress(self) -> None:
        """The run has made progress: count failures from zero again."""
        self._failures_in_a_row = 0

    def heartbeats_stopped(self, rank: int, incarnation: str) -> None:
        """Called when relaxd has not heard a rank for its time to live."""
        for process in self._processes:
            if process.rank == rank and process.incarnation in ("", incarnation):
                self._silent_ranks.add(rank)
                self._silent.set()

    async def stop(self) -> None:
        """Ask all ranks to end; a rank that does not end within a grace period is killed if we started it."""
        self._stopping = True
        self._silent.set()
        await asyncio.gather(*(process.stop(STOP_GRACE_SECONDS) for process in self._processes))
        await asyncio.gather(*(process.kill() for process in self._abandoned if process.running))

    async def _start(self) -> None:
        self._hear_again()
        self._processes = list(await self._launcher.launch(self._specs))
        if self._launcher.owns_processes:
            incarnation = self._processes[0].incarnation
            detail = {"instance": self.instance, "ranks": len(self._specs), "incarnation": incarnation}
            self._on_event("daemon_started", detail)

    def _hear_again(self) -> None:
        self._silent.clear()
        self._silent_ranks.clear()

    async def _first_end(self) -> int:
        """Rank of the first process that ended or fell silent."""
        waits = [asyncio.create_task(process.wait()) for process in self._processes]
        silent = asyncio.create_task(self._silent.wait())
        try:
            await asyncio.wait([*waits, silent], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*waits, silent):
                task.cancel()
        for process in self._processes:
            if not process.running:
                return process.rank
        return min(self._silent_ranks, default=0)

    async def _await_others(self) -> None:
        await asyncio.gather(*(process.stop(STOP_GRACE_SECONDS) for process in self._processes))

    async def _clear(self) -> None:
        """Kill what is left of the incarnation.

        A silent process is left alone: when it wakes, it ends because its term is old. It is killed too if its
        successor needs the same port and state directory.
        """
        for process in self._processes:
            if not process.running:
                continue
            if process.rank in self._silent_ranks and not self._specs[process.rank].keeps_port:
                self._abandoned.append(process)
                self._goodbyes.append(asyncio.create_task(self._see_off(process)))
            else:
                await process.kill()
        self._processes = []

    async def _see_off(self, process: Process) -> None:
        await process.wait()
        detail = {"instance": self.instance, "rank": process.rank, "exit_code": process.exit_code}
        self._on_event("fenced_daemon_ended", detail)
