"""Terms and heartbeats by a monotonic clock."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from relax.common.v1 import common_pb2
from relax.controller.v1 import controller_pb2
from relax_common.errors import NotFound, StaleTerm, Unavailable
from relaxd.disk import DiskWaits
from relaxd.registry import Registry
from relaxd.store import NewEvent, Store, new_event

TTL = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class House:
    """A store and its registry, as one relaxd has them."""

    def __init__(self, folder: Path, now: float = 0.0) -> None:
        self.store = Store(folder, DiskWaits())
        self.clock = Clock()
        self.clock.now = now
        self.registry = Registry(self.store, TTL, self.clock)

    async def grant(self, incarnation: str, rank: int = 0) -> int:
        return (await self.registry.grant(request(incarnation, rank), "r", told)).term

    def pass_time(self, until: float) -> list[int]:
        """Checks as often as relaxd does; returns the ranks that expired."""
        expired = []
        while self.clock.now < until:
            self.clock.now = min(until, self.clock.now + self.registry.look_seconds)
            expired += [daemon.rank for daemon in self.registry.expire()]
        return expired


def told(term: int) -> NewEvent:
    return new_event("daemon_registered", "r", {"term": term})


def request(incarnation: str, rank: int = 0) -> controller_pb2.RegisterRequest:
    identity = common_pb2.Identity(instance="r.actor", role=common_pb2.ROLE_ACTOR, incarnation=incarnation)
    return controller_pb2.RegisterRequest(identity=identity, rank=rank, world_size=2, address="a:1")


def beat(term: int, rank: int = 0) -> controller_pb2.HeartbeatRequest:
    return controller_pb2.HeartbeatRequest(instance="r.actor", term=term, rank=rank, waits_for="rows")


def lives(folder: Path, story: Callable[[House], Awaitable[None]], now: float = 0.0) -> None:
    async def live() -> None:
        house = House(folder, now)
        try:
            await story(house)
        finally:
            await house.store.close()

    asyncio.run(live())


def test_ranks_of_one_incarnation_share_a_term_and_the_next_one_is_higher(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        assert [await house.grant("x", 0), await house.grant("x", 1), await house.grant("y", 0)] == [1, 1, 2]

    lives(tmp_path, story)


def test_I8_the_heartbeat_of_an_older_incarnation_is_stale(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        await house.grant("x")
        await house.grant("y")
        with pytest.raises(StaleTerm):
            house.registry.beat(beat(1))
        house.registry.beat(beat(2))
        with pytest.raises(NotFound):
            house.registry.beat(beat(2, rank=7))

    lives(tmp_path, story)


def test_I8_a_call_of_an_older_incarnation_is_stale_even_if_its_own_rank_has_no_successor_yet(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        await house.grant("x", 0)
        await house.grant("x", 1)
        assert await house.grant("y", 1) == 2
        with pytest.raises(StaleTerm):
            house.registry.check_term("r.actor", 1)
        house.registry.check_term("r.actor", 2)
        with pytest.raises(NotFound):
            house.registry.check_term("r.critic", 1)

    lives(tmp_path, story)


def test_a_silent_daemon_expires_once_and_a_beating_one_never(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        await house.grant("x", 0)
        await house.grant("x", 1)
        assert house.pass_time(until=9.0) == []
        house.registry.beat(beat(1, rank=0))
        assert house.pass_time(until=12.0) == [1]
        assert house.pass_time(until=13.0) == []
        assert [daemon.rank for daemon in house.registry.alive(common_pb2.ROLE_ACTOR, "r")] == [0]

    lives(tmp_path, story)


def test_a_relaxd_that_slept_longer_than_planned_extends_everybody_once(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        await house.grant("x", 0)
        await house.grant("x", 1)
        house.pass_time(until=5.0)
        house.clock.now = 25.0
        assert house.registry.expire() == [], "it has heard nobody, because it slept itself"
        assert house.pass_time(until=34.0) == []
        house.registry.beat(beat(1, rank=1))
        assert house.pass_time(until=36.5) == [0], "who stays silent after the sleep is replaced"

    lives(tmp_path, story)


def test_a_jump_of_the_wall_clock_expires_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(house: House) -> None:
        await house.grant("x")
        for jump in (3600.0, -3600.0):
            monkeypatch.setattr("time.time", lambda jump=jump: 1e9 + jump)
            assert house.registry.expire() == []

    lives(tmp_path, story)


def test_terms_survive_a_restart_and_everybody_is_extended_once(tmp_path: Path) -> None:
    async def first(house: House) -> None:
        await house.grant("x")

    async def second(house: House) -> None:
        assert house.store.own_term == 2
        assert house.registry.expire() == []
        assert await house.grant("x") == 1
        assert await house.grant("y") == 2
        assert house.pass_time(until=1011.0) == [0]

    lives(tmp_path, first)
    lives(tmp_path, second, now=1000.0)


def no_room(*_: object) -> int:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    raise error


def test_I8_a_term_that_could_not_be_written_is_not_granted_and_never_granted_twice(tmp_path: Path) -> None:
    """The write of a new term fails once, relaxd answers the repeat, dies, and another incarnation registers."""

    async def first(house: House) -> None:
        assert await house.grant("x") == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("relaxd.store._apply", no_room)
            with pytest.raises(Unavailable, match="no room below"):
                await house.grant("y")
        house.registry.beat(beat(1))
        assert await house.grant("y") == 2, "asked again with room"

    async def second(house: House) -> None:
        assert await house.grant("z") == 3
        assert [event.revision for event in house.store.events] == [1, 2, 3]

    lives(tmp_path, first)
    lives(tmp_path, second)


def test_a_wait_is_shown_until_the_run_has_moved_on(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        term = await house.grant("a")
        house.clock.now = 3.0
        house.registry.beat(beat(term))
        assert house.registry.waits_told_after(2.0) == ["r.actor waits for rows"]
        assert house.registry.waits_told_after(3.5) == [], "the head has moved since"
        house.clock.now = 4.0
        house.registry.beat(beat(term))
        assert house.registry.waits_told_after(3.5) == ["r.actor waits for rows"]
        nothing = beat(term)
        nothing.waits_for = ""
        house.registry.beat(nothing)
        assert house.registry.waits_told_after(0.0) == []

    lives(tmp_path, story)
