"""One run at the broker: its state, its log, its payload and who waits for it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from relax_common.errors import RelaxError, Unavailable
from relax_common.logs import get_logger
from relax_queue import events as ev
from relax_queue.blobs import Blobs
from relax_queue.decision import Decision
from relax_queue.fold import fold, opened
from relax_queue.group import Status
from relax_queue.journal import Journal
from relax_queue.leasing import expire
from relax_queue.lifecycle import restart
from relax_queue.metrics import publish
from relax_queue.payload import Payload
from relax_queue.planning import plan
from relax_queue.run_state import Phase, RunState
from relax_queue.waits import Waits

T = TypeVar("T")

Lease = tuple[str, int]  # group, attempt
PUBLISH_SECONDS = 0.25


class Run:
    """All changes go through `transact`: decide, apply, log, fsync, answer. Everything happens on one event loop."""

    def __init__(self, folder: Path, state: RunState, journal: Journal) -> None:
        self.state = state
        self.journal = journal
        self.payload = Payload()
        self.blobs = Blobs(folder / "blobs")
        self.waits = Waits(state.run)
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._timers: dict[Lease, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._publishing: asyncio.TimerHandle | None = None

    @classmethod
    async def create(cls, folder: Path, event: ev.RunOpened) -> "Run":
        """A new run; durable when this returns."""
        journal = Journal(folder / "log")
        if next(journal.replay(), None) is not None:
            raise Unavailable(f"run {event.run} is being opened by another call")
        journal.append([event])
        await journal.sync()
        return cls(folder, opened(event), journal)

    @classmethod
    async def recover(cls, folder: Path) -> "Run | None":
        """The run behind a log on disk, without its payload; None if its opening never became durable."""
        journal = Journal(folder / "log")
        state = fold(journal.replay())
        if state is None:
            journal.close()
            return None
        run = cls(folder, state, journal)
        run.blobs.sweep(state)
        await run.transact(restart)
        for group in state.where(Status.LEASED):
            run.extend((group.id, group.attempts))
        get_logger().info("run_recovered", run=state.run, head=state.head, revision=state.applied_revision)
        return run

    async def transact(self, command: Callable[[Decision], T]) -> T:
        """Run a command; its events and what can be planned behind them are one durable transaction."""
        decision = Decision(self.state)
        try:
            result = command(decision)
        except RelaxError:
            self._finish(decision)
            await self.sync()
            raise
        self._finish(decision)
        await self.sync()
        return result

    def _finish(self, decision: Decision) -> None:
        if not decision.events:
            return
        plan(decision)
        try:
            self.journal.append(decision.events)
        except OSError as error:
            raise self._break(error) from error
        self.payload.free(self.state)
        self.blobs.sweep(self.state)
        self._drop_timers()
        self._publish_soon()
        self.waits.changed()

    def _publish_soon(self) -> None:
        # Gauges are read every few seconds; setting all of them in each transaction would cost as much as a put.
        if self._publishing is None:
            self._publishing = asyncio.get_running_loop().call_later(PUBLISH_SECONDS, self._publish)

    def _publish(self) -> None:
        self._publishing = None
        publish(self.state)

    async def sync(self) -> None:
        """Wait until everything decided so far is durable; nothing is answered before."""
        try:
            advanced = await self.journal.sync()
        except OSError as error:
            raise self._break(error) from error
        if advanced:
            self.waits.changed()

    def _break(self, error: OSError) -> RelaxError:
        # Memory is ahead of the log now: only a restart from the log gives a state that may be answered from.
        message = f"the log of run {self.state.run} cannot be written: {error.strerror}; free space and start again"
        if not self.broken.done():
            self.broken.set_result(message)
        return Unavailable(message)

    def extend(self, lease: Lease) -> None:
        """(Re)start the time to live of a lease."""
        old = self._timers.pop(lease, None)
        if old is not None:
            old.cancel()
        loop = asyncio.get_running_loop()
        self._timers[lease] = loop.call_later(self.state.spec.lease_ttl_seconds, self._run_out, lease)

    def _run_out(self, lease: Lease) -> None:
        self._timers.pop(lease, None)
        task = asyncio.create_task(self.transact(lambda decision: expire(decision, *lease)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _drop_timers(self) -> None:
        for group, attempt in list(self._timers):
            found = self.state.groups[group]
            if found.status is not Status.LEASED or found.attempts != attempt:
                self._timers.pop((group, attempt)).cancel()

    @property
    def ended(self) -> bool:
        return self.state.phase is Phase.ENDED

    def close(self) -> None:
        for timer in (*self._timers.values(), *([self._publishing] if self._publishing else [])):
            timer.cancel()
        self.journal.close()
