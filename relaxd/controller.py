"""The controller's state and what may be done to it. An answer waits until what it says is on disk."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

from dcs.client import DcsControl
from relax.common.v1 import common_pb2
from relax.controller.v1 import controller_pb2
from relax_common.errors import (
    AlreadyExists,
    InvalidInput,
    NotFound,
    Precondition,
    RelaxError,
    RunEnded,
    StaleTerm,
    Unavailable,
)
from relax_common.names import check_name, folder_below
from relax_common.process.telemetry import get_logger
from relax_common.recipe import Recipe, parse_recipe, to_toml
from relax_common.rpc.registration import check_protocol, make_identity
from relax_common.versions import PolicyVersion
from relaxd.data.fingerprint import check_unchanged, remember
from relaxd.disk import DiskWaits
from relaxd.launch.commands import run_of_instance
from relaxd.launch.external import ExternalLauncher
from relaxd.launch.launcher import Launcher
from relaxd.launch.local import LocalLauncher
from relaxd.plan.checks import check_launch, check_recipe, count_gpus
from relaxd.registry import Registry
from relaxd.run.live import LiveRun
from relaxd.run.manager import RunManager
from relaxd.run.state import FINAL, Event, Phase, RunRecord
from relaxd.store import NewEvent, Store, new_event, put_run

PAGE_TOKEN_MAX = 9
"""Digits of the number of a run."""


@dataclass(frozen=True)
class Settings:
    """The part of relaxd's configuration that the controller needs."""

    state_dir: Path
    runs_dir: Path
    """All run directories must be below it, also those that a caller names."""
    ttl_seconds: float
    instance: str
    starts_daemons: bool
    check_allowed: Callable[[Recipe], None]
    """Raises InvalidInput for a recipe that names programs or functions that are not allowed."""


class Controller:
    def __init__(self, settings: Settings, on_fenced: Callable[[StaleTerm], None]) -> None:
        """`on_fenced` is called when another relaxd has taken over a run of this one."""
        self._settings = settings
        self._waits = DiskWaits()
        self._store = Store(settings.state_dir, self._waits)
        self.registry = Registry(self._store, settings.ttl_seconds)
        self.identity = make_identity(common_pb2.ROLE_CONTROLLER, settings.instance)
        self._own: controller_pb2.Daemon | None = None
        self._runs: dict[str, LiveRun] = {}
        self._request_ids: dict[str, str] = {}
        for request_id, message in self._store.runs:
            self._runs[message.run] = LiveRun(RunRecord.from_proto(message), self._store, self._waits)
            self._request_ids[request_id] = message.run
        self._creating = asyncio.Lock()
        self._managers: dict[str, RunManager] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_fenced = on_fenced
        self._launcher: Launcher | None = None

    async def start(self, address: str, metrics_address: str) -> None:
        """Called when the listener is open: continue the runs that had not ended."""
        self._own = controller_pb2.Daemon(
            identity=self.identity,
            address=address,
            metrics_address=metrics_address,
            term=self._store.own_term,
            alive=True,
            pid=os.getpid(),
        )
        if self._settings.starts_daemons:
            self._launcher = LocalLauncher(address, self._settings.state_dir / "daemons", self._store)
        else:
            self._launcher = ExternalLauncher(self.registry)
        self._start_task(self._watch_heartbeats())
        for live in self._runs.values():
            if not live.final:
                self._manage(live)

    async def stop(self) -> None:
        """Stop all daemons that relaxd started. Runs stay as they are on disk, so a restart continues them."""
        if self._settings.starts_daemons:
            await asyncio.gather(*(manager.roles.stop() for manager in self._managers.values()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._store.close()

    def _start_task(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            get_logger().error("task_failed", task=task.get_name(), exc_info=task.exception())

    async def create_run(self, request: controller_pb2.CreateRunRequest) -> tuple[RunRecord, list[str]]:
        recipe = parse_recipe(request.recipe_toml)
        self._settings.check_allowed(recipe)
        derived, _ = await asyncio.to_thread(check_recipe, recipe)
        if self._settings.starts_daemons:
            check_launch(recipe, await asyncio.to_thread(count_gpus) if recipe.placement.gpus_per_host else 0)
        if request.validate_only:
            return _new_record("", to_toml(recipe), "", recipe.total_steps), derived.lines()
        if not request.request_id:
            raise InvalidInput("CreateRun needs a request_id, so that a repeated call creates one run")
        created = asyncio.create_task(self._create(request, recipe))
        # Shielded: a caller that goes away must not leave a run on disk that memory does not know.
        return (await asyncio.shield(created)).record, derived.lines()

    async def _create(self, request: controller_pb2.CreateRunRequest, recipe: Recipe) -> LiveRun:
        async with self._creating:
            known = self._request_ids.get(request.request_id)
            if known is not None:
                return self._runs[known]
            busy = next((name for name, live in self._runs.items() if not live.final), None)
            if busy is not None:
                raise Precondition(f"run {busy} is in progress on this controller; stop it or start another relaxd")
            record = self._new_run(request.run_dir, recipe)
            told = new_event("run_created", record.run, {"run_dir": record.run_dir})
            await self._store.write(put_run(record.to_proto(), request.request_id), event=told)
            live = self._runs[record.run] = LiveRun(record, self._store, self._waits)
            self._request_ids[request.request_id] = record.run
            self._manage(live)
            return live

    def _new_run(self, given: str, recipe: Recipe) -> RunRecord:
        root = self._settings.runs_dir
        run_dir = folder_below(root, given, "run_dir") if given else _free_folder(root, recipe.name, self._runs)
        name = check_name(run_dir.name, "run_dir")
        if name in self._runs:
            raise AlreadyExists(f"run {name} exists; choose another run_dir")
        if (run_dir / "events.jsonl").exists():
            raise AlreadyExists(f"run_dir {run_dir} holds another run; choose an empty one")
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / "recipe.toml").write_text(to_toml(recipe))
        except OSError as error:
            raise InvalidInput(f"run_dir {run_dir}: {error.strerror}") from error
        return _new_record(name, to_toml(recipe), str(run_dir), recipe.total_steps)

    def _manage(self, live: LiveRun) -> None:
        if self._launcher is None:
            raise Unavailable("the controller is still starting")
        self._start_task(self._carry(live, self._launcher))

    async def _carry(self, live: LiveRun, launcher: Launcher) -> None:
        """Manage one run to its end. Data and weights are checked again, because days may have passed since
        CreateRun."""
        run = live.record.run
        recipe = parse_recipe(live.record.recipe_toml)

        def on_event(kind: str, detail: dict[str, object]) -> None:
            self._store.write_later("its events", event=new_event(kind, run, detail))

        try:
            checked = await asyncio.to_thread(check_recipe, recipe)
        except RelaxError as error:
            await live.move_when_possible(Event.BROKEN, error.message)
            return
        manager = RunManager(
            live, recipe, checked, self.registry, launcher, self._waits, self._store.own_term, on_event
        )
        self._managers[run] = manager
        task = asyncio.create_task(manager.run_to_end())
        await asyncio.wait([task])
        failure = None if task.cancelled() else task.exception()
        if failure is None:
            return
        if isinstance(failure, StaleTerm):
            self._on_fenced(failure)
            return
        get_logger().error("run_broken", run=run, exc_info=failure)
        await manager.give_up(f"relaxd could not carry the run on: {failure!r}; see relaxd.log")

    def run(self, name: str) -> LiveRun:
        live = self._runs.get(name)
        if live is None:
            raise NotFound(f"no run {name!r}; known: {', '.join(self._runs) or 'none'}")
        return live

    def list_runs(self, page_size: int, page_token: str) -> tuple[list[RunRecord], str]:
        """Newest first."""
        runs = [live.record for live in reversed(self._runs.values())]
        if page_token and not (page_token.isascii() and page_token.isdigit() and len(page_token) <= PAGE_TOKEN_MAX):
            raise InvalidInput(f"page_token {page_token[:40]!r} was not given by ListRuns")
        start = int(page_token or 0)
        end = start + page_size
        return runs[start:end], str(end) if end < len(runs) else ""

    async def stop_run(self, name: str) -> RunRecord:
        live = self.run(name)
        if not live.final:
            await live.move(Event.STOP_ASKED, told=new_event("run_stop_asked", name, {}))
            if name in self._managers:
                self._managers[name].stop_asked()
        return live.record

    async def resume_run(self, name: str, total_steps: int, accept_changed_data: bool) -> RunRecord:
        live = self.run(name)
        record = live.record
        if record.phase is Phase.ENDED:
            raise RunEnded(f"run {name} has ended: nothing is left of its {record.total_steps} steps")
        if record.phase not in FINAL:
            return record
        recipe = parse_recipe(record.recipe_toml)
        if total_steps and total_steps < record.total_steps:
            raise InvalidInput(f"total_steps = {total_steps}: run {name} has {record.total_steps}, it can only grow")
        recipe = recipe.model_copy(update={"total_steps": total_steps or record.total_steps})
        _, prompts = await asyncio.to_thread(check_recipe, recipe)
        check = remember if accept_changed_data else check_unchanged
        await asyncio.to_thread(check, Path(record.run_dir), prompts.rows)
        await live.move(
            Event.RESUMED,
            told=new_event("run_resumed", name, {"total_steps": recipe.total_steps}),
            total_steps=recipe.total_steps,
            recipe_toml=to_toml(recipe),
        )
        self._manage(live)
        return live.record

    def daemons(self) -> list[controller_pb2.Daemon]:
        """relaxd itself, then the registered daemons by name and rank."""
        registered = [daemon for _, daemon in sorted(self.registry.daemons.items())]
        return [self._own, *registered] if self._own is not None else registered

    async def register(self, request: controller_pb2.RegisterRequest) -> controller_pb2.RegisterResponse:
        check_protocol(request.identity)
        who = request.identity
        if not who.instance or not who.incarnation or who.role == common_pb2.ROLE_UNSPECIFIED:
            raise InvalidInput("Register needs an instance name, an incarnation and a role")
        check_name(who.instance, "instance")
        wanted = run_of_instance(who.instance)
        live = self._runs.get(wanted) if wanted else None
        if wanted and live is None:
            raise Unavailable(f"run {wanted} has not been created yet")
        assignment = self._assignment(live.record if live else None)

        def told(term: int) -> NewEvent:
            detail = {"instance": who.instance, "rank": request.rank, "term": term, "pid": request.pid}
            return new_event("daemon_registered", wanted, detail)

        daemon = await self.registry.grant(request, wanted, told)
        return controller_pb2.RegisterResponse(
            term=daemon.term, assignment=assignment, ttl_seconds=self.registry.ttl_seconds, controller=self.identity
        )

    def _assignment(self, run: RunRecord | None) -> controller_pb2.Assignment:
        """Raises Unavailable until the peers that the assignment names have registered; the daemon repeats the call."""
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

    async def _watch_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self.registry.look_seconds)
            for daemon in self.registry.expire():
                detail = {"instance": daemon.identity.instance, "rank": daemon.rank, "term": daemon.term}
                self._store.write_later("its events", event=new_event("heartbeats_stopped", daemon.run, detail))
                for manager in self._managers.values():
                    manager.roles.heartbeats_stopped(daemon)

    async def report_head_lost(self, request: controller_pb2.ReportHeadLostRequest) -> PolicyVersion:
        """The only call that leads to a ROLLBACK record."""
        self.run(request.run)
        self.registry.check_term(request.instance, request.term)
        found = self.registry.alive(common_pb2.ROLE_DCS)
        if not found:
            raise Unavailable("dcs has not registered yet")
        dcs = DcsControl(found[0].address, request.run)
        try:
            head = await dcs.roll_back(PolicyVersion.from_proto(request.head), request.reason)
        finally:
            await dcs.close()
        detail = {"reason": request.reason, "head": head.number}
        self._store.write_later("its events", event=new_event("rollback", request.run, detail))
        return head

    async def watch_events(self, after_revision: int) -> AsyncIterator[controller_pb2.WatchEventsResponse]:
        async for event in self._store.watch(after_revision):
            yield event


def _new_record(name: str, recipe_toml: str, run_dir: str, total_steps: int) -> RunRecord:
    return RunRecord(name, recipe_toml, run_dir, total_steps, created_ns=time.time_ns())


def _free_folder(root: Path, name: str, taken: dict[str, LiveRun]) -> Path:
    """A folder for a run that names none: name and time, plus a number if two are made in one second."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    count, folder = 1, root / stem
    while folder.name in taken or folder.exists():
        count += 1
        folder = root / f"{stem}-{count}"
    return folder
