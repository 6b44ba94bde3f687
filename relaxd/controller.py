"""The controller's state and what may be done to it. An answer waits until what it says is on disk."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from relax.common.v1 import common_pb2
from relax.controller.v1 import controller_pb2
from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc
from relax_common.errors import AlreadyExists, InvalidInput, NotFound, Precondition, RunEnded, StaleTerm, Unavailable
from relax_common.process.logs import get_logger
from relax_common.recipe import Recipe, parse_recipe, to_toml
from relax_common.rpc.channels import acall_with_retry, aio_channel
from relax_common.rpc.identity import check_protocol, make_identity
from relaxd.launch.commands import run_of_instance
from relaxd.launch.local import LocalLauncher
from relaxd.plan.checks import check_launch, check_recipe, count_gpus
from relaxd.registry import Registry
from relaxd.run.manager import RunManager
from relaxd.store import Store, Write, put_run

_FINAL = (controller_pb2.RUN_STATE_ENDED, controller_pb2.RUN_STATE_FAILED, controller_pb2.RUN_STATE_STOPPED)
ROLLBACK_SECONDS = 60.0


class Controller:
    def __init__(
        self,
        state_dir: Path,
        ttl_seconds: float,
        instance: str,
        *,
        starts_daemons: bool,
        check_allowed: Callable[[Recipe], None],
    ) -> None:
        self._check_allowed = check_allowed
        self._starts_daemons = starts_daemons
        self._state_dir = state_dir
        self._store = Store(state_dir)
        self.registry = Registry(self._store, ttl_seconds)
        self.identity = make_identity(common_pb2.ROLE_CONTROLLER, instance)
        self._runs: dict[str, controller_pb2.Run] = {}
        self._request_ids: dict[str, str] = {}
        for request_id, run in self._store.runs:
            self._runs[run.run] = run
            self._request_ids[request_id] = run.run
        self._managers: dict[str, RunManager] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._launcher: LocalLauncher | None = None

    async def start(self, address: str) -> None:
        """The listener is open: go on with the runs that had not ended."""
        self._launcher = LocalLauncher(address, self._state_dir / "daemons")
        self._start_task(self._watch_leases())
        for run in self._runs.values():
            if run.state not in _FINAL:
                self._manage(run, parse_recipe(run.recipe_toml))

    async def stop(self) -> None:
        """Stop all daemons that it started. Runs stay as they are on disk, so a restart goes on with them."""
        if self._starts_daemons:
            await asyncio.gather(*(manager.stop_units() for manager in self._managers.values()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._store.close()

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            get_logger().error("task_failed", task=task.get_name(), exc_info=task.exception())

    # Runs ---------------------------------------------------------------------------------------------------------

    async def create_run(self, request: controller_pb2.CreateRunRequest) -> tuple[controller_pb2.Run, list[str]]:
        recipe = parse_recipe(request.recipe_toml)
        self._check_allowed(recipe)
        derived, _ = await asyncio.to_thread(check_recipe, recipe)
        if self._starts_daemons:
            check_launch(recipe, await asyncio.to_thread(count_gpus) if recipe.placement.gpus_per_host else 0)
        if request.validate_only:
            return controller_pb2.Run(recipe_toml=to_toml(recipe)), derived.lines()
        if not request.request_id:
            raise InvalidInput("CreateRun needs a request_id, so that a repeated call creates one run")
        known = self._request_ids.get(request.request_id)
        if known is not None:
            return self._runs[known], derived.lines()
        busy = next((run.run for run in self._runs.values() if run.state not in _FINAL), None)
        if busy is not None:
            raise Precondition(f"run {busy} is in progress on this controller; stop it or start another relaxd")
        run = self._new_run(request, recipe)
        self._runs[run.run] = run
        self._request_ids[request.request_id] = run.run
        await self._event("run_created", run.run, {"run_dir": run.run_dir}, put_run(run, request.request_id))
        self._manage(run, recipe)
        return run, derived.lines()

    def _new_run(self, request: controller_pb2.CreateRunRequest, recipe: Recipe) -> controller_pb2.Run:
        name = f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        run_dir = Path(request.run_dir) if request.run_dir else self._state_dir / "runs" / name
        name = run_dir.name
        if name in self._runs:
            raise AlreadyExists(f"run {name} exists; choose another run_dir")
        if (run_dir / "events.jsonl").exists():
            raise AlreadyExists(f"run_dir {run_dir} holds another run; choose an empty one")
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / "recipe.toml").write_text(to_toml(recipe))
        except OSError as error:
            raise InvalidInput(f"run_dir {run_dir}: {error.strerror}") from error
        run = controller_pb2.Run(
            run=name,
            state=controller_pb2.RUN_STATE_STARTING,
            recipe_toml=to_toml(recipe),
            run_dir=str(run_dir),
            total_steps=recipe.total_steps,
        )
        run.created_at.GetCurrentTime()
        return run

    def _manage(self, run: controller_pb2.Run, recipe: Recipe) -> None:
        if self._launcher is None:
            raise Unavailable("the controller is still starting")

        async def changed() -> None:
            await self._publish(run)

        def on_event(kind: str, detail: dict[str, object]) -> None:
            self._start_task(self._event(kind, run.run, detail))

        launcher = self._launcher if self._starts_daemons else None
        manager = RunManager(run, recipe, self._store, self.registry, launcher, changed, on_event)
        self._managers[run.run] = manager
        task = self._start_task(manager.run_to_end())
        task.add_done_callback(lambda done: self._manager_done(done, run))

    def _manager_done(self, task: asyncio.Task[None], run: controller_pb2.Run) -> None:
        """An error of relaxd itself must not leave a run that seems to go on."""
        if not task.cancelled() and task.exception() is not None:
            run.state = controller_pb2.RUN_STATE_FAILED
            run.error = f"relaxd could not carry the run on: {task.exception()!r}; see relaxd.log"
            self._start_task(self._publish(run))

    async def _publish(self, run: controller_pb2.Run) -> None:
        """Tell watchers; write only what must survive (state, not progress)."""
        run.revision += 1
        if run.state in _FINAL or run.state == controller_pb2.RUN_STATE_DRAINING:
            await self._store.write(put_run(run, ""))
        async with self._changed:
            self._changed.notify_all()

    def run(self, name: str) -> controller_pb2.Run:
        run = self._runs.get(name)
        if run is None:
            raise NotFound(f"no run {name!r}; known: {', '.join(self._runs) or 'none'}")
        return run

    def list_runs(self, page_size: int, page_token: str) -> tuple[list[controller_pb2.Run], str]:
        runs = list(reversed(self._runs.values()))
        start = int(page_token) if page_token.isdigit() else 0
        end = start + page_size
        return runs[start:end], str(end) if end < len(runs) else ""

    async def watch_run(self, name: str) -> AsyncIterator[controller_pb2.Run]:
        run = self.run(name)
        seen = -1
        while True:
            if run.revision != seen:
                seen = run.revision
                yield run
            if run.state in _FINAL:
                return
            async with self._changed:
                if run.revision == seen:
                    await self._changed.wait()

    async def stop_run(self, name: str) -> controller_pb2.Run:
        run = self.run(name)
        if run.state not in _FINAL:
            self._managers[name].ask_stop()
            await self._event("run_stop_asked", name, {})
        return run

    async def resume_run(self, name: str) -> controller_pb2.Run:
        run = self.run(name)
        if run.state == controller_pb2.RUN_STATE_ENDED:
            raise RunEnded(f"run {name} has ended: nothing is left of its {run.total_steps} steps")
        if run.state in _FINAL:
            run.state, run.error = controller_pb2.RUN_STATE_STARTING, ""
            self._manage(run, parse_recipe(run.recipe_toml))
            await self._event("run_resumed", name, {}, put_run(run, ""))
        return run

    # Daemons ------------------------------------------------------------------------------------------------------

    async def register(self, request: controller_pb2.RegisterRequest) -> controller_pb2.RegisterResponse:
        check_protocol(request.identity)
        if not request.identity.instance or request.identity.role == common_pb2.ROLE_UNSPECIFIED:
            raise InvalidInput("Register needs an instance name and a role")
        wanted = run_of_instance(request.identity.instance)
        run = self._runs.get(wanted)
        if wanted and run is None:
            raise Unavailable(f"run {wanted} has not been created yet")
        assignment = self._assignment(run)
        daemon, writes = self.registry.grant(request, run.run if run else "")
        detail = {"instance": daemon.identity.instance, "rank": daemon.rank, "term": daemon.term, "pid": daemon.pid}
        await self._event("daemon_registered", daemon.run, detail, *writes)
        return controller_pb2.RegisterResponse(
            term=daemon.term, assignment=assignment, ttl_seconds=self.registry.ttl_seconds, controller=self.identity
        )

    def _assignment(self, run: controller_pb2.Run | None) -> controller_pb2.Assignment:
        """Raises Unavailable while the peers it names are not there; the daemon repeats the call."""
        if run is None:
            return controller_pb2.Assignment()
        addresses = {}
        for role, name in ((common_pb2.ROLE_QUEUE, "queue"), (common_pb2.ROLE_DCS, "dcs")):
            found = self.registry.alive(role)
            if not found:
                raise Unavailable(f"{name} has not registered yet")
            addresses[name] = found[0].address
        actors = [d for d in self.registry.alive(common_pb2.ROLE_ACTOR, run.run) if d.rank == 0]
        peers = controller_pb2.Peers(
            **addresses,
            actor=actors[0].address if actors else "",
            rollout={d.identity.instance: d.address for d in self.registry.alive(common_pb2.ROLE_ROLLOUT, run.run)},
        )
        return controller_pb2.Assignment(run=run.run, recipe_toml=run.recipe_toml, run_dir=run.run_dir, peers=peers)

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(self.registry.ttl_seconds / 8)
            for daemon in self.registry.expire():
                detail = {"instance": daemon.identity.instance, "rank": daemon.rank, "term": daemon.term}
                await self._event("lease_ran_out", daemon.run, detail)
                for manager in self._managers.values():
                    manager.lease_ran_out(daemon)

    async def report_head_lost(self, request: controller_pb2.ReportHeadLostRequest) -> common_pb2.PolicyVersion:
        """The only way to a ROLLBACK record."""
        self.run(request.run)
        holder = next((d for d in self.registry.daemons.values() if d.identity.instance == request.instance), None)
        if holder is None:
            raise NotFound(f"{request.instance} is not registered")
        if request.term < holder.term:
            raise StaleTerm(f"{request.instance}: term {request.term} is over, term {holder.term} has taken over; exit")
        found = self.registry.alive(common_pb2.ROLE_DCS)
        if not found:
            raise Unavailable("dcs has not registered yet")
        stub = dcs_pb2_grpc.DcsServiceStub(aio_channel(found[0].address))
        rollback = dcs_pb2.RollbackRequest(run=request.run, lost_head=request.head, reason=request.reason)
        response = await acall_with_retry(
            lambda s: stub.Rollback(rollback, timeout=s),
            what="dcs to append the rollback",
            deadline_seconds=ROLLBACK_SECONDS,
        )
        await self._event("rollback", request.run, {"reason": request.reason, "head": response.record.head})
        return common_pb2.PolicyVersion(lineage=response.record.lineage, number=response.record.head)

    # Events -------------------------------------------------------------------------------------------------------

    async def _event(self, kind: str, run: str, detail: dict[str, object], *writes: Write) -> None:
        """An event, durable in one transaction with what it tells of."""
        _, write = self._store.add_event(kind, run, json.dumps(detail))
        await self._store.write(*writes, write)
        async with self._changed:
            self._changed.notify_all()

    async def watch_events(self, after_revision: int) -> AsyncIterator[controller_pb2.WatchEventsResponse]:
        position = after_revision
        while True:
            while position < len(self._store.events):
                yield self._store.events[position]
                position += 1
            async with self._changed:
                if position == len(self._store.events):
                    await self._changed.wait()
