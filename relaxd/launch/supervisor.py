"""A role's processes under supervision: all ranks together, restarted together under a new incarnation.

| seen | done |
|---|---|
| a process exits 0 and the unit may end | the unit has finished |
| a process exits with EXIT_BAD_CONFIG | the unit has failed: starting again cannot help |
| a process exits otherwise | the other ranks are killed; after a back-off all start again |
| a lease ran out (frozen, cut off) | the same, but the silent process is left to its fencing |
| the restart budget is used up without progress in between | the unit has failed, with the last words of its log |
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence

from relax_common.process.config import EXIT_BAD_CONFIG
from relax_common.process.logs import get_logger
from relax_common.process.ports import keepable_port
from relaxd.launch.local import LocalLauncher, Process, ProcessSpec, adopt, last_line
from relaxd.store import Store, put_process

BACKOFF_SECONDS = (0.1, 0.5, 1.0, 2.0, 4.0)
"""Waits before the restarts that are allowed without progress in between."""
STOP_GRACE_SECONDS = 20.0


class Supervisor:
    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        launcher: LocalLauncher,
        store: Store,
        *,
        ends_by_itself: bool,
        on_event: Callable[[str, dict[str, object]], None],
    ) -> None:
        self.instance = specs[0].instance
        self._specs = specs
        self._launcher = launcher
        self._store = store
        self._ends_by_itself = ends_by_itself
        self._on_event = on_event
        self._processes: list[Process] = []
        self._abandoned: list[Process] = []
        self._goodbyes: list[asyncio.Task[None]] = []
        self._silent = asyncio.Event()
        self._silent_ranks: set[int] = set()
        self._stopping = False
        self._failures_in_a_row = 0
        self._ports: dict[int, int] = {row.rank: row.port for row in store.processes if row.instance == self.instance}
        self.restarts = 0

    async def run(self) -> str:
        """Until the unit has finished or was stopped (returns ''), or has failed (returns why)."""
        await self._adopt()
        while not self._stopping:
            if not self._processes:
                await self._start()
            rank = await self._first_end()
            if self._stopping:
                break
            ended = self._processes[rank]
            why = "lease ran out" if ended.running else f"exit {ended.exit_code}"
            if not ended.running and ended.exit_code == 0 and self._ends_by_itself:
                await self._await_others()
                return ""
            self._on_event("daemon_lost", {"instance": self.instance, "rank": rank, "why": why})
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
        """The run has moved on: restarts are counted anew."""
        self._failures_in_a_row = 0

    def lease_ran_out(self, rank: int, incarnation: str) -> None:
        """relaxd has not heard a rank for its TTL."""
        for process in self._processes:
            if process.row.rank == rank and process.row.incarnation == incarnation:
                self._silent_ranks.add(rank)
                self._silent.set()

    async def stop(self) -> None:
        """SIGTERM to all ranks, SIGKILL after a grace."""
        self._stopping = True
        self._silent.set()
        await asyncio.gather(*(process.stop(STOP_GRACE_SECONDS) for process in self._processes))
        await asyncio.gather(*(process.kill() for process in self._abandoned if process.running))

    async def _adopt(self) -> None:
        rows = {row.rank: row for row in self._store.processes if row.instance == self.instance}
        found = [adopt(rows[spec.rank]) if spec.rank in rows else None for spec in self._specs]
        alive = [process for process in found if process is not None]
        if len(alive) == len(self._specs):
            self._processes = alive
        else:
            for process in alive:
                await process.kill()

    async def _start(self) -> None:
        incarnation = uuid.uuid4().hex
        store_port = keepable_port()
        self._silent.clear()
        self._silent_ranks.clear()
        for spec in self._specs:
            port = 0
            if spec.keeps_port:
                port = self._ports.setdefault(spec.rank, keepable_port())
            process = self._launcher.start(spec, incarnation, port, store_port)
            self._processes.append(process)
            get_logger().info("daemon_started", instance=self.instance, rank=spec.rank, pid=process.row.pid)
        await self._store.write(*(put_process(process.row) for process in self._processes))
        self._on_event(
            "daemon_started", {"instance": self.instance, "ranks": len(self._specs), "incarnation": incarnation}
        )

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
                return process.row.rank
        return min(self._silent_ranks, default=0)

    async def _await_others(self) -> None:
        await asyncio.gather(*(process.stop(STOP_GRACE_SECONDS) for process in self._processes))

    async def _clear(self) -> None:
        """Kill what is left of the incarnation.

        A silent process is left alone: its old term ends it when it wakes. Where its successor needs the same port and
        state directory it is killed too.
        """
        for process in self._processes:
            if not process.running:
                continue
            if process.row.rank in self._silent_ranks and not self._specs[process.row.rank].keeps_port:
                self._abandoned.append(process)
                self._goodbyes.append(asyncio.create_task(self._see_off(process)))
            else:
                await process.kill()
        self._processes = []

    async def _see_off(self, process: Process) -> None:
        await process.wait()
        detail = {"instance": self.instance, "rank": process.row.rank, "exit_code": process.exit_code}
        self._on_event("fenced_daemon_ended", detail)
