"""One run from its creation to its end: daemons up, runs opened, prompts fed, log followed, everything ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc.aio

from relax.common.v1 import common_pb2
from relax.controller.v1 import controller_pb2
from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc
from relax.queue.v1 import queue_pb2, queue_pb2_grpc
from relax_common.errors import DeadlineExceeded, Exhausted, RelaxError, Unavailable, from_rpc
from relax_common.process.logs import get_logger
from relax_common.recipe import Recipe
from relax_common.rpc.channels import acall_with_retry, aio_channel
from relaxd.launch.commands import actor_specs, forward_specs, rollout_specs, support_specs
from relaxd.launch.external import ExternalSupervisor
from relaxd.launch.local import LocalLauncher, ProcessSpec
from relaxd.launch.supervisor import Supervisor
from relaxd.plan.checks import check_recipe
from relaxd.plan.requests import dcs_request, queue_request
from relaxd.registry import Registry
from relaxd.run.drop_streak import FailureStreak
from relaxd.run.feeder import Feeder
from relaxd.run.follower import RunFollower, describe_waits, run_metrics
from relaxd.run.step_metrics import show_run
from relaxd.run.summary import write_summary
from relaxd.store import Store

START_SECONDS = 300.0
CALL_SECONDS = 60.0
SAVE_SECONDS = 3600.0
_TICK_SECONDS = 0.5


class RunManager:
    """Owns the units, the feeder and the follower of one run. `changed` is called whenever `run` has changed.

    Without a launcher the run's daemons are started by something else and register.
    """

    def __init__(
        self,
        run: controller_pb2.Run,
        recipe: Recipe,
        store: Store,
        registry: Registry,
        launcher: LocalLauncher | None,
        changed: Callable[[], Awaitable[None]],
        on_event: Callable[[str, dict[str, object]], None],
    ) -> None:
        self.run = run
        self._recipe = recipe
        self._derived, prompts = check_recipe(recipe)
        self._store = store
        self._registry = registry
        self._changed = changed
        self.run_dir = Path(run.run_dir)
        self._feeder = Feeder(run.run, recipe, prompts.rows, store.own_term)
        self._follower = RunFollower(
            run.run, self.run_dir, self._wake, FailureStreak.for_step_of(recipe.prompts_per_step)
        )
        self._woken = asyncio.Event()
        self._sealed = False
        self._stop_asked = run.state == controller_pb2.RUN_STATE_DRAINING
        # Without checkpoints a stopped run ends with its export; with them it can be resumed.
        self._resumable = recipe.checkpoint.every_steps > 0
        self._stopping: asyncio.Task[None] | None = None
        logs = self.run_dir / "logs"

        def unit(specs: list[ProcessSpec], *, ends_by_itself: bool = False) -> Supervisor | ExternalSupervisor:
            if launcher is None:
                export = self.run_dir / "export" if ends_by_itself else None
                return ExternalSupervisor(specs, registry, export=export, on_event=on_event)
            return Supervisor(specs, launcher, store, ends_by_itself=ends_by_itself, on_event=on_event)

        self._support = [unit([spec]) for spec in support_specs(logs)]
        self._actor = unit(actor_specs(run.run, recipe, self._derived, logs), ends_by_itself=True)
        # A role that only computes ends when the queue says that the run is over, a rollout server when it is told to.
        self._forward = [
            unit(specs, ends_by_itself=True) for specs in forward_specs(run.run, recipe, self._derived, logs)
        ]
        self._rollout = [unit(specs) for specs in rollout_specs(run.run, recipe, self._derived, logs)]

    @property
    def units(self) -> list[Supervisor | ExternalSupervisor]:
        return [*self._support, self._actor, *self._forward, *self._rollout]

    def _wake(self) -> None:
        self._woken.set()

    def ask_stop(self) -> None:
        self._stop_asked = True
        if self._resumable and self._stopping is None:
            self._stopping = asyncio.create_task(self._actor.stop())
        self._wake()

    def lease_ran_out(self, daemon: controller_pb2.Daemon) -> None:
        for unit in self.units:
            if unit.instance == daemon.identity.instance:
                unit.lease_ran_out(daemon.rank, daemon.identity.incarnation)

    async def run_to_end(self) -> None:
        """Sets the run's final state; never raises for the run's own failures."""
        try:
            state = await self._to_end()
        except RelaxError as error:
            state = controller_pb2.RUN_STATE_FAILED
            self.run.error = error.message
            get_logger().error("run_failed", run=self.run.run, error=error.message)
        await self.stop_units()
        self._follower.close()
        await asyncio.to_thread(write_summary, self.run_dir, self._recipe)
        self._show_head()
        # Last, because whoever watches the run reads the summary as soon as it has ended.
        self.run.state = state
        await self._changed()

    async def stop_units(self) -> None:
        """The roles first: an actor or a rollout server that drains still talks to the queue and dcs."""
        await asyncio.gather(*(unit.stop() for unit in (self._actor, *self._forward, *self._rollout)))
        # Queue and dcs that something else has started serve other runs too.
        await asyncio.gather(*(unit.stop() for unit in self._support if isinstance(unit, Supervisor)))

    async def _to_end(self) -> controller_pb2.RunState:
        tasks = [asyncio.create_task(self._keep(unit)) for unit in self._support]
        try:
            queue_address, dcs_address = await self._support_addresses(tasks)
            queue = queue_pb2_grpc.QueueServiceStub(aio_channel(queue_address))
            dcs = dcs_pb2_grpc.DcsServiceStub(aio_channel(dcs_address))
            await self._open(queue, dcs, dcs_address)
            actor = asyncio.create_task(self._keep(self._actor))
            tasks += [asyncio.create_task(self._keep(unit)) for unit in (*self._forward, *self._rollout)]
            tasks += [
                asyncio.create_task(self._follower.follow_queue(queue)),
                asyncio.create_task(self._follower.follow_dcs(dcs)),
            ]
            feeding = asyncio.create_task(self._feed(queue, dcs))
            await self._until_done(actor, [*tasks, feeding])
            feeding.cancel()
            if self._stopping is not None:
                await self._stopping
                await self._until_done(asyncio.create_task(self._save_checkpoint(dcs)), tasks)
                return controller_pb2.RUN_STATE_STOPPED
            await self._until_done(asyncio.create_task(self._end(queue, dcs)), tasks)
            return controller_pb2.RUN_STATE_ENDED
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, unit: Supervisor | ExternalSupervisor) -> None:
        failure = await unit.run()
        if failure:
            raise RelaxError(failure)

    async def _until_done(self, main: asyncio.Task[None], others: list[asyncio.Task[None]]) -> None:
        """Wait for `main`; a failure of any other task meanwhile is raised at once."""
        waiting = {main, *others}
        while not main.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        main.result()

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
            if time.monotonic() > end:
                missing = " and ".join(name for name, at in zip(("queue", "dcs"), found, strict=True) if not at)
                raise DeadlineExceeded(f"waited {START_SECONDS:.0f} s for {missing} to register; see its log")
            self.run.waits[:] = ["run waits for queue and dcs to register"]
            await asyncio.sleep(0.05)

    async def _open(
        self, queue: queue_pb2_grpc.QueueServiceStub, dcs: dcs_pb2_grpc.DcsServiceStub, dcs_address: str
    ) -> None:
        to_dcs = dcs_request(self.run.run, self._recipe, self._derived, self.run_dir)
        await acall_with_retry(
            lambda s: dcs.OpenRun(to_dcs, timeout=s), what="dcs to open the run", deadline_seconds=CALL_SECONDS
        )
        to_queue = queue_request(self.run.run, self._recipe, self._derived, dcs_address)
        await acall_with_retry(
            lambda s: queue.OpenRun(to_queue, timeout=s),
            what="the queue to open the run",
            deadline_seconds=CALL_SECONDS,
        )
        if self.run.state == controller_pb2.RUN_STATE_STARTING:
            self.run.state = controller_pb2.RUN_STATE_RUNNING
            await self._changed()

    async def _feed(self, queue: queue_pb2_grpc.QueueServiceStub, dcs: dcs_pb2_grpc.DcsServiceStub) -> None:
        """Keep the window filled, and the Run message fresh."""
        while True:
            await self._until_due()
            try:
                await self._feed_once(queue)
                await self._look_at_checkpoints(dcs)
            except grpc.aio.AioRpcError as rpc_error:
                error = from_rpc(rpc_error)
                if not isinstance(error, (Unavailable, DeadlineExceeded, Exhausted)):
                    raise error from rpc_error
                # A peer is away (its unit restarts it) or the queue's disk is full; the next round goes on from the
                # queue's own position.
                self.run.waits[:] = [f"feeder waits: {error.message}"]
            await self._changed()

    async def _until_due(self) -> None:
        """Until the events followed so far ask for a round, or the next tick."""
        tick = time.monotonic() + _TICK_SECONDS
        while (left := tick - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), left)
            # Many events arrive together; one look serves them all.
            await asyncio.sleep(0.05)
            self._woken.clear()
            ledger = self._follower.ledger
            wanted = not self._sealed and (self._stop_asked or self._feeder.runs_low(ledger.count("pending")))
            if wanted or ledger.count("rolled_back"):
                return

    async def _feed_once(self, queue: queue_pb2_grpc.QueueServiceStub) -> None:
        response = await queue.GetStatus(queue_pb2.GetStatusRequest(run=self.run.run), timeout=CALL_SECONDS)
        status = response.runs[0]
        self._refresh(status)
        self._follower.failures.check()
        again = self._follower.ledger.groups_in("rolled_back")
        if again and self._follower.rollback_revision:
            await self._feeder.offer_again(queue, again, self._follower.rollback_revision)
        exhausted = False
        if not self._sealed and not self._stop_asked:
            exhausted = await self._feeder.top_up(queue, status)
        if (exhausted or (self._stop_asked and not self._resumable)) and not self._sealed:
            await queue.SealRun(queue_pb2.SealRunRequest(run=self.run.run), timeout=CALL_SECONDS)
            self._sealed = True
            self.run.state = controller_pb2.RUN_STATE_DRAINING

    async def _look_at_checkpoints(self, dcs: dcs_pb2_grpc.DcsServiceStub) -> None:
        """A disk that refuses is told while the run goes on, and ends it when it does not get better."""
        if not self._resumable:
            return
        found = await dcs.ListCheckpoints(dcs_pb2.ListCheckpointsRequest(run=self.run.run), timeout=CALL_SECONDS)
        if found.failures_in_a_row >= self._recipe.checkpoint.failures_max:
            raise Exhausted(f"{found.failures_in_a_row} saves in a row failed: {found.last_error}")
        if found.last_error:
            self.run.waits.append(found.last_error)

    async def _save_checkpoint(self, dcs: dcs_pb2_grpc.DcsServiceStub) -> None:
        await acall_with_retry(
            lambda s: dcs.SaveCheckpoint(dcs_pb2.SaveCheckpointRequest(run=self.run.run), timeout=s),
            what="dcs to save the last checkpoint",
            deadline_seconds=SAVE_SECONDS,
        )

    def _show_head(self) -> None:
        head = self._follower.head
        if head is not None:
            if not self.run.has_head or self.run.head != head.to_proto():
                for unit in self.units:
                    unit.progress()
            self.run.has_head = True
            self.run.head.CopyFrom(head.to_proto())

    def _refresh(self, status: queue_pb2.RunStatus) -> None:
        self._show_head()
        for name, value in run_metrics(self._follower.last_line).items():
            self.run.metrics[name] = value
        for name, value in self._follower.ledger.counts().items():
            self.run.metrics[f"groups_{name}"] = value
        restarts = {unit.instance: unit.restarts for unit in self.units}
        show_run(self.run.run, self.run.head.number, self.run.metrics, restarts)
        self.run.waits[:] = describe_waits(status, list(self._registry.daemons.values()))

    async def _end(self, queue: queue_pb2_grpc.QueueServiceStub, dcs: dcs_pb2_grpc.DcsServiceStub) -> None:
        self.run.state = controller_pb2.RUN_STATE_DRAINING
        await asyncio.gather(*(unit.stop() for unit in self._rollout))
        await acall_with_retry(
            lambda s: queue.EndRun(queue_pb2.EndRunRequest(run=self.run.run), timeout=s),
            what="the queue to end the run",
            deadline_seconds=CALL_SECONDS,
        )
        try:
            await asyncio.wait_for(self._follower.ended.wait(), CALL_SECONDS)
        except TimeoutError:
            raise DeadlineExceeded(f"waited {CALL_SECONDS:.0f} s for the queue's last event") from None
        if self._resumable:
            await self._save_checkpoint(dcs)
        await acall_with_retry(
            lambda s: dcs.EndRun(dcs_pb2.EndRunRequest(run=self.run.run), timeout=s),
            what="dcs to end the run",
            deadline_seconds=CALL_SECONDS,
        )
