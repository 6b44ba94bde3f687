"""Manages one run from its creation to its end: starts daemons, opens the run, feeds prompts, follows the log, ends
all."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from dcs.client import DcsControl
from relax.common.v1 import common_pb2
from relax.queue.v1 import queue_pb2
from relax_common.errors import DeadlineExceeded, Exhausted, RelaxError, StaleTerm, Unavailable
from relax_common.process.telemetry import get_logger
from relax_common.recipe import Derived, Recipe
from relax_queue.client import AioQueueClient
from relaxd.data import Prompts
from relaxd.data.fingerprint import check_unchanged
from relaxd.disk import DiskWaits
from relaxd.launch.launcher import Launcher
from relaxd.launch.supervisor import OnEvent, Supervisor
from relaxd.plan.requests import dcs_request, queue_request
from relaxd.registry import Registry
from relaxd.run.drops import DropStreak
from relaxd.run.feeder import Feeder
from relaxd.run.follower import RunFollower, describe_waits, run_metrics
from relaxd.run.live import LiveRun
from relaxd.run.roles import Roles
from relaxd.run.state import Event, Phase, Progress
from relaxd.run.step_metrics import show_run
from relaxd.run.summary import write_summary

T = TypeVar("T")

START_SECONDS = 300.0
_TICK_SECONDS = 0.5
_PATIENCE_SECONDS = 2.0
LAST_EVENT_SECONDS = 60.0


class RunManager:
    """Owns the roles, the feeder and the follower of one run; reports its changes through `live`."""

    def __init__(
        self,
        live: LiveRun,
        recipe: Recipe,
        checked: tuple[Derived, Prompts],
        registry: Registry,
        launcher: Launcher,
        waits: DiskWaits,
        term: int,
        on_event: OnEvent,
    ) -> None:
        self.live = live
        record = live.record
        self._recipe = recipe
        self._derived, prompts = checked
        self._registry = registry
        self._waits = waits
        self._run_dir = Path(record.run_dir)
        self._rows = prompts.rows
        self._feeder = Feeder(recipe, prompts.rows, term)
        self._follower = RunFollower(self._run_dir, self._wake, DropStreak.of_recipe(recipe), waits)
        self.roles = Roles(record.run, recipe, self._derived, self._run_dir, launcher, on_event)
        self._woken = asyncio.Event()
        self._sealed = False
        self._head_moved_at = 0.0
        # Without checkpoints a stopped run ends with its export; with them it can be resumed.
        self._resumable = recipe.checkpoint.every_steps > 0
        self._stopping: asyncio.Task[None] | None = None

    @property
    def _stop_asked(self) -> bool:
        return self.live.record.phase is Phase.STOPPING

    def _wake(self) -> None:
        self._woken.set()

    def stop_asked(self) -> None:
        """Called when the run has entered its phase `stopping`."""
        if self._resumable and self._stopping is None:
            self._stopping = asyncio.create_task(self.roles.actor.stop())
        self._wake()

    async def run_to_end(self) -> None:
        """Brings the run into its final phase. Raises StaleTerm if another relaxd has taken the run over; other errors
        that are raised are faults of relaxd itself."""
        error = ""
        try:
            await self._waits.hold("the data's fingerprint", self._check_data)
            event = await self._to_end()
        except StaleTerm:
            # The run is its successor's, which goes on with it: it must not be marked as failed.
            self._follower.close()
            raise
        except RelaxError as failure:
            event, error = Event.BROKEN, failure.message
        except OSError as failure:
            event, error = Event.BROKEN, f"{failure.filename or self._run_dir}: {failure.strerror}"
        if error:
            get_logger().error("run_failed", run=self.live.record.run, error=error)
        await self._close(event, error)

    async def give_up(self, error: str) -> None:
        """An error in relaxd itself must leave neither daemons nor a run that seems to go on."""
        await self.roles.stop()
        self._follower.close()
        await self.live.move_when_possible(Event.BROKEN, error)

    async def _close(self, event: Event, error: str) -> None:
        showing = asyncio.create_task(self._show_disk_waits())
        try:
            await self.roles.stop()
            await self._follower.flush()
            self._follower.close()
            await self._waits.hold("the report", self._report)
            self._show(waits=())
            # Last, because a watcher reads the summary as soon as the run has ended.
            await self.live.move_when_possible(event, error)
        finally:
            showing.cancel()

    async def _check_data(self) -> None:
        await asyncio.to_thread(check_unchanged, self._run_dir, self._rows)

    async def _report(self) -> None:
        await asyncio.to_thread(write_summary, self._run_dir, self._recipe)

    async def _show_disk_waits(self) -> None:
        while True:
            self._show(waits=tuple(self._waits.lines()))
            await asyncio.sleep(_TICK_SECONDS)

    async def _to_end(self) -> Event:
        record = self.live.record
        # Show what an earlier relaxd saw, from the files: a watcher must not have to wait for the next version.
        self._show(waits=())
        tasks = [asyncio.create_task(self._keep(role)) for role in self.roles.support]
        peers: list[AioQueueClient | DcsControl] = []
        try:
            queue_address, dcs_address = await self._support_addresses(tasks)
            queue, dcs = AioQueueClient(queue_address, record.run), DcsControl(dcs_address, record.run)
            peers += [queue, dcs]
            await dcs.open(dcs_request(record.run, self._recipe, self._derived, self._run_dir))
            asked = queue_request(record.run, self._recipe, self._derived, dcs_address)
            await queue.open_run(asked.spec, asked.recipe_digest, asked.dcs_address)
            self._show(waits=())
            await self.live.move_when_possible(Event.OPENED)
            if self._stop_asked:
                self.stop_asked()
            actor = asyncio.create_task(self._keep(self.roles.actor))
            tasks += [asyncio.create_task(self._keep(role)) for role in (*self.roles.forward, *self.roles.rollout)]
            tasks += [
                asyncio.create_task(self._follower.follow_queue(queue)),
                asyncio.create_task(self._follower.follow_dcs(dcs)),
            ]
            feeding = asyncio.create_task(self._feed(queue, dcs))
            tasks.append(feeding)
            await self._until_done(actor, tasks)
            feeding.cancel()
            tasks[tasks.index(feeding)] = asyncio.create_task(self._show_disk_waits())
            closing = self._end(queue, dcs) if self._stopping is None else self._save(dcs, self._stopping)
            return await self._until_done(asyncio.create_task(closing), tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for peer in peers:
                await peer.close()

    async def _keep(self, role: Supervisor) -> None:
        failure = await role.run()
        if failure:
            raise RelaxError(failure)

    async def _until_done(self, main: asyncio.Task[T], others: list[asyncio.Task[None]]) -> T:
        """Wait for `main`; if another task fails first, raise its error at once."""
        waiting: set[asyncio.Task[T] | asyncio.Task[None]] = {main, *others}
        try:
            while not main.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            return main.result()
        finally:
            main.cancel()

    async def _support_addresses(self, tasks: list[asyncio.Task[None]]) -> tuple[str, str]:
        end = time.monotonic() + START_SECONDS
        while True:
            found = [
                next((d.address for d in self._registry.alive(role)), "")
                for role in (common_pb2.ROLE_QUEUE, common_pb2.ROLE_DCS)
            ]
            if all(found):
                return found[0], found[1]
            for task in tasks:
                if task.done():
                    task.result()
            missing = " and ".join(name for name, at in zip(("queue", "dcs"), found, strict=True) if not at)
            if time.monotonic() > end:
                raise DeadlineExceeded(f"waited {START_SECONDS:.0f} s for {missing} to register; see its log")
            self._show(waits=(f"run waits for {missing} to register", *self._waits.lines()))
            await asyncio.sleep(0.05)

    async def _feed(self, queue: AioQueueClient, dcs: DcsControl) -> None:
        """Keep the window of prompts filled and the displayed state of the run fresh."""
        while True:
            await self._until_due()
            round_ = asyncio.create_task(self._round(queue, dcs))
            try:
                while not (await asyncio.wait([round_], timeout=_PATIENCE_SECONDS))[0]:
                    # A peer is away, and its supervisor restarts it.
                    self._show(waits=(*self._waits.lines(), "feeder waits for the queue and dcs to answer"))
                waits = round_.result()
            finally:
                round_.cancel()
            self._show(waits=(*self._waits.lines(), *waits))

    async def _round(self, queue: AioQueueClient, dcs: DcsControl) -> list[str]:
        """Who waits for what."""
        waits: list[str] = []
        try:
            status = await queue.status()
            waits += [*describe_waits(status), *self._registry.waits_told_after(self._head_moved_at)]
            await self._feed_once(queue, status)
            waits += await self._checkpoint_waits(dcs)
        except (Unavailable, DeadlineExceeded, Exhausted) as error:
            # The queue is away for long, or its disk is full; the next round continues from the queue's own position.
            waits.append(f"feeder waits: {error.message}")
        return waits

    async def _until_due(self) -> None:
        """Wait until the events followed so far require a round, or until the next tick."""
        tick = time.monotonic() + _TICK_SECONDS
        while (left := tick - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), left)
            # Many events arrive together; one round serves them all.
            await asyncio.sleep(0.05)
            self._woken.clear()
            ledger = self._follower.ledger
            wanted = not self._sealed and (self._stop_asked or self._feeder.runs_low(ledger.count("pending")))
            if wanted or ledger.count("rolled_back"):
                return

    async def _feed_once(self, queue: AioQueueClient, status: queue_pb2.RunStatus) -> None:
        self._note_head()
        self._follower.drops.check()
        again = self._follower.ledger.groups_in("rolled_back")
        if again and self._follower.rollback_revision:
            await self._feeder.offer_again(queue, again, self._follower.rollback_revision)
        exhausted = False
        if not self._sealed and not self._stop_asked:
            exhausted = await self._feeder.top_up(queue, status)
        if (exhausted or (self._stop_asked and not self._resumable)) and not self._sealed:
            await queue.seal()
            self._sealed = True
            await self.live.move_when_possible(Event.SEALED)

    async def _checkpoint_waits(self, dcs: DcsControl) -> list[str]:
        """A disk that refuses a checkpoint is named while the run goes on; too many failures in a row end the run."""
        if not self._resumable:
            return []
        found = await dcs.checkpoints()
        if found.failures_in_a_row >= self._recipe.checkpoint.failures_max:
            raise RelaxError(f"{found.failures_in_a_row} saves in a row failed: {found.last_error}")
        return [found.last_error] if found.last_error else []

    def _note_head(self) -> None:
        """A new version is progress: earlier failures no longer count."""
        if self._follower.head != self.live.record.progress.head:
            self._head_moved_at = time.monotonic()
            self.roles.progress()

    def _show(self, waits: tuple[str, ...]) -> None:
        follower, before = self._follower, self.live.record.progress
        metrics = {**before.metrics, **run_metrics(follower.last_line)}
        metrics |= {f"groups_{name}": float(value) for name, value in follower.ledger.counts().items()}
        head = follower.head or before.head
        show_run(self.live.record.run, head.number if head else 0, metrics, self.roles.restarts())
        wants_more = head is None or head.number < self._recipe.total_steps
        if wants_more and follower.drops.dropped.total() >= self._recipe.prompts_per_step:
            waits = (*waits, f"run waits for a group to train on; dropped since the last one: {follower.drops.line()}")
        self.live.show(
            Progress(
                head=head,
                metrics=MappingProxyType(metrics),
                waits=waits,
                rollbacks=tuple(follower.rollbacks),
                dropped=MappingProxyType(dict(follower.drops.dropped)),
            )
        )

    async def _save(self, dcs: DcsControl, stopping: asyncio.Task[None]) -> Event:
        await stopping
        await dcs.save_checkpoint()
        return Event.SAVED

    async def _end(self, queue: AioQueueClient, dcs: DcsControl) -> Event:
        await self.roles.stop_rollout()
        await queue.end()
        try:
            await asyncio.wait_for(self._follower.ended.wait(), LAST_EVENT_SECONDS)
        except TimeoutError:
            if not self._waits.lines():
                raise DeadlineExceeded(f"waited {LAST_EVENT_SECONDS:.0f} s for the queue's last event") from None
            # The follower is stopped by a full disk, and the run says so.
            await self._follower.ended.wait()
        if self._resumable:
            await dcs.save_checkpoint()
        await dcs.end()
        return Event.DONE
