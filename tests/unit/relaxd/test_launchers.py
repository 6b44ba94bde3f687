"""Both launchers, and one as a newcomer would write it, pass the launcher's suite."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import launcher_conformance as conformance
import pytest

from relax.common.v1 import common_pb2
from relax.controller.v1 import controller_pb2
from relaxd.ctl.relaxd_process import stop_leftovers
from relaxd.disk import DiskWaits
from relaxd.launch.external import ExternalLauncher
from relaxd.launch.launcher import Launcher, ProcessSpec
from relaxd.launch.local import LocalLauncher, pids_with_state_below
from relaxd.launch.supervisor import Supervisor
from relaxd.registry import Registry
from relaxd.store import Store, new_event

SUPPORT = Path(conformance.__file__).parent
SECONDS = conformance.SECONDS


class LocalHouse:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(folder, DiskWaits())
        self.launcher: Launcher = LocalLauncher("127.0.0.1:1", folder / "daemons", self.store)

    def spec(self, rank: int, *, seconds: float) -> ProcessSpec:
        return ProcessSpec(
            instance="r.role",
            rank=rank,
            module="timed_work",
            log_path=conformance.log_below(self.folder, rank),
            args=("--seconds", str(seconds)),
            env={"PYTHONPATH": str(SUPPORT)},
        )

    async def appear(self, specs: list[ProcessSpec]) -> None:
        return

    async def close(self) -> None:
        await self.store.close()


class ExternalHouse:
    """Something else runs the processes: they register, beat, hear of a drain, and leave a file behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(folder, DiskWaits())
        self.registry = Registry(self.store, ttl_seconds=0.4)
        self.launcher: Launcher = ExternalLauncher(self.registry)
        self._seconds: dict[int, float] = {}
        self._lives: list[asyncio.Task[None]] = []
        self._count = 0

    def spec(self, rank: int, *, seconds: float) -> ProcessSpec:
        self._seconds[rank] = seconds
        return ProcessSpec(
            instance="r.role",
            rank=rank,
            module="",
            log_path=conformance.log_below(self.folder, rank),
            leaves=self.folder / f"left-{rank}",
        )

    async def appear(self, specs: list[ProcessSpec]) -> None:
        self._count += 1
        for spec in specs:
            identity = common_pb2.Identity(
                instance=spec.instance, role=common_pb2.ROLE_ACTOR, incarnation=str(self._count)
            )
            request = controller_pb2.RegisterRequest(identity=identity, rank=spec.rank)
            daemon = await self.registry.grant(request, "r", lambda term: new_event("registered", "r", {"term": term}))
            self._lives.append(asyncio.create_task(self._live(spec, daemon.term)))

    async def _live(self, spec: ProcessSpec, term: int) -> None:
        end = asyncio.get_running_loop().time() + self._seconds[spec.rank]
        beat = controller_pb2.HeartbeatRequest(instance=spec.instance, rank=spec.rank, term=term)
        while asyncio.get_running_loop().time() < end:
            if self.registry.beat(beat):
                return
            await asyncio.sleep(0.02)
        assert spec.leaves is not None
        spec.leaves.touch()

    async def close(self) -> None:
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
        await self.store.close()


class TaskLauncher:
    """A new launcher is one class: this one runs the roles as tasks of relaxd's own event loop."""

    owns_processes = True

    def __init__(self) -> None:
        self._launches = 0

    async def launch(self, specs: Sequence[ProcessSpec]) -> Sequence[TaskProcess]:
        self._launches += 1
        return [TaskProcess(spec, f"incarnation {self._launches}") for spec in specs]


class TaskProcess:
    pid = 0

    def __init__(self, spec: ProcessSpec, incarnation: str) -> None:
        self.rank = spec.rank
        self.incarnation = incarnation
        self._task = asyncio.create_task(asyncio.sleep(float(spec.args[1])))

    @property
    def running(self) -> bool:
        return not self._task.done()

    @property
    def exit_code(self) -> int | None:
        return 0 if self._task.done() and not self._task.cancelled() else None

    async def wait(self) -> None:
        await asyncio.wait([self._task])

    async def stop(self, grace_seconds: float) -> None:
        self._task.cancel()
        await self.wait()

    async def kill(self) -> None:
        await self.stop(0.0)


class TaskHouse(LocalHouse):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.launcher = TaskLauncher()


Check = Callable[[conformance.House], Awaitable[None]]


@pytest.mark.parametrize("house", [LocalHouse, ExternalHouse, TaskHouse])
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_a_launcher_keeps_its_promise(house: type[LocalHouse | ExternalHouse], check: Check, tmp_path: Path) -> None:
    async def live() -> None:
        built = house(tmp_path)
        try:
            await check(built)
        finally:
            await built.close()

    asyncio.run(live())


def test_a_restarted_relaxd_finds_the_processes_of_the_one_before_and_kills_strays(tmp_path: Path) -> None:
    async def first() -> list[int]:
        house = LocalHouse(tmp_path)
        started = await house.launcher.launch([house.spec(rank, seconds=60.0) for rank in range(2)])
        await house.store.write()
        await house.close()
        return [process.pid for process in started]

    async def second(known: list[int], stray: int) -> None:
        house = LocalHouse(tmp_path)
        found = await house.launcher.launch([house.spec(rank, seconds=60.0) for rank in range(2)])
        assert [process.pid for process in found] == known
        assert stray not in set(pids_with_state_below(tmp_path / "daemons"))
        await asyncio.gather(*(process.stop(SECONDS) for process in found))
        await house.close()

    known = asyncio.run(first())
    # Started by a relaxd that died before it had recorded the process.
    stray = subprocess.Popen(
        [sys.executable, "-m", "timed_work", "--state-dir", str(tmp_path / "daemons/r.role"), "--seconds", "60"],
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
    )
    try:
        asyncio.run(second(known, stray.pid))
    finally:
        stray.kill()
    assert stray.wait(10) == -signal.SIGKILL


def test_what_a_dead_relaxd_has_left_is_stopped(tmp_path: Path) -> None:
    async def start() -> int:
        house = LocalHouse(tmp_path)
        (process,) = await house.launcher.launch([house.spec(0, seconds=60.0)])
        await house.close()
        return process.pid

    pid = asyncio.run(start())
    end = time.monotonic() + SECONDS
    while pid not in set(pids_with_state_below(tmp_path)):
        assert time.monotonic() < end, "it has not become the daemon yet"
        time.sleep(0.02)
    assert stop_leftovers(tmp_path) == 1
    assert not list(pids_with_state_below(tmp_path))


def test_failures_are_counted_in_a_row_and_progress_resets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaxd.launch.supervisor.BACKOFF_SECONDS", (0.0, 0.0))

    async def story() -> None:
        house = LocalHouse(tmp_path)
        # `--seconds` without a number ends with a traceback, exit code 1.
        spec = house.spec(0, seconds=1.0)
        broken = ProcessSpec(**{**vars(spec), "args": ("--seconds",)})
        starts: list[str] = []

        def on_event(kind: str, detail: dict[str, object]) -> None:
            starts.append(kind)
            if kind == "daemon_started" and starts.count(kind) in (2, 3):
                role.progress()

        role = Supervisor([broken], house.launcher, ends_by_itself=False, on_event=on_event)
        why = await asyncio.wait_for(role.run(), SECONDS)
        assert "ended 3 times in a row (exit 1)" in why
        assert starts.count("daemon_started") == 5, "two failures were forgotten"
        await house.close()

    asyncio.run(story())
