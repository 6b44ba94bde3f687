"""What every launcher must do. A test file gives each check a `House`: a launcher, and the world around it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from relaxd.launch.launcher import Launcher, ProcessSpec
from relaxd.launch.supervisor import Supervisor

SECONDS = 30.0


class House(Protocol):
    """The launcher under test, and what happens outside it."""

    launcher: Launcher

    def spec(self, rank: int, *, seconds: float) -> ProcessSpec:
        """A process that does its work in so many seconds, and ends early when it is asked to."""
        ...

    async def appear(self, specs: list[ProcessSpec]) -> None:
        """Where something else starts processes: it has started these."""
        ...


async def started_ranks_run_until_their_work_is_done(house: House) -> None:
    specs = [house.spec(rank, seconds=0.3) for rank in range(2)]
    await house.appear(specs)
    processes = await house.launcher.launch(specs)
    assert [process.rank for process in processes] == [0, 1]
    assert all(process.running and process.exit_code is None for process in processes)
    await asyncio.wait_for(asyncio.gather(*(process.wait() for process in processes)), SECONDS)
    assert [(process.running, process.exit_code) for process in processes] == [(False, 0), (False, 0)]


async def all_ranks_of_one_launch_share_an_incarnation(house: House) -> None:
    specs = [house.spec(rank, seconds=60.0) for rank in range(2)]
    await house.appear(specs)
    first = await house.launcher.launch(specs)
    assert len({process.incarnation for process in first}) == 1
    await asyncio.gather(*(process.stop(SECONDS) for process in first))
    await house.appear(specs)
    second = await house.launcher.launch(specs)
    if house.launcher.owns_processes:
        assert second[0].incarnation != first[0].incarnation, "a new start is a new incarnation"
    await asyncio.gather(*(process.stop(SECONDS) for process in second))


async def a_process_that_is_asked_to_stop_ends(house: House) -> None:
    spec = house.spec(0, seconds=60.0)
    await house.appear([spec])
    (process,) = await house.launcher.launch([spec])
    await asyncio.wait_for(process.stop(SECONDS), SECONDS)
    assert not process.running
    await asyncio.wait_for(process.stop(SECONDS), SECONDS)


async def killing_never_hangs(house: House) -> None:
    spec = house.spec(0, seconds=60.0)
    await house.appear([spec])
    (process,) = await house.launcher.launch([spec])
    await asyncio.wait_for(process.kill(), SECONDS)
    assert process.running is not house.launcher.owns_processes
    await asyncio.wait_for(process.stop(SECONDS), SECONDS)


async def a_supervised_role_finishes_when_its_work_is_done(house: House) -> None:
    spec = house.spec(0, seconds=0.3)
    await house.appear([spec])
    role = Supervisor([spec], house.launcher, ends_by_itself=True, on_event=lambda kind, detail: None)
    assert await asyncio.wait_for(role.run(), SECONDS) == ""
    assert role.restarts == 0


async def a_supervised_role_can_be_stopped(house: House) -> None:
    spec = house.spec(0, seconds=60.0)
    await house.appear([spec])
    role = Supervisor([spec], house.launcher, ends_by_itself=True, on_event=lambda kind, detail: None)
    running = asyncio.create_task(role.run())
    await asyncio.sleep(0)
    await asyncio.wait_for(role.stop(), SECONDS)
    assert await asyncio.wait_for(running, SECONDS) == ""


CHECKS: list[Callable[[House], Awaitable[None]]] = [
    started_ranks_run_until_their_work_is_done,
    all_ranks_of_one_launch_share_an_incarnation,
    a_process_that_is_asked_to_stop_ends,
    killing_never_hangs,
    a_supervised_role_finishes_when_its_work_is_done,
    a_supervised_role_can_be_stopped,
]


def log_below(folder: Path, rank: int) -> Path:
    return folder / "logs" / f"role-{rank}.log"
