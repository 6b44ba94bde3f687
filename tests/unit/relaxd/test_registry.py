"""Terms and leases by a monotonic clock."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from relax.common.v1 import common_pb2
from relax.controller.v1 import controller_pb2
from relax_common.errors import NotFound, StaleTerm
from relaxd.registry import Registry
from relaxd.store import Store


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def request(incarnation: str, rank: int = 0) -> controller_pb2.RegisterRequest:
    identity = common_pb2.Identity(instance="r.actor", role=common_pb2.ROLE_ACTOR, incarnation=incarnation)
    return controller_pb2.RegisterRequest(identity=identity, rank=rank, world_size=2, address="a:1")


def beat(term: int, rank: int = 0) -> controller_pb2.HeartbeatRequest:
    return controller_pb2.HeartbeatRequest(instance="r.actor", term=term, rank=rank, waits_for="rows")


def test_ranks_of_one_incarnation_share_a_term_and_the_next_one_is_higher(tmp_path: Path) -> None:
    registry = Registry(Store(tmp_path), 10.0, Clock())
    assert registry.grant(request("x", 0), "r")[0].term == 1
    assert registry.grant(request("x", 1), "r")[0].term == 1
    assert registry.grant(request("y", 0), "r")[0].term == 2


def test_I8_the_heartbeat_of_an_older_incarnation_is_stale(tmp_path: Path) -> None:
    registry = Registry(Store(tmp_path), 10.0, Clock())
    registry.grant(request("x"), "r")
    registry.grant(request("y"), "r")
    with pytest.raises(StaleTerm):
        registry.beat(beat(1))
    registry.beat(beat(2))
    with pytest.raises(NotFound):
        registry.beat(beat(2, rank=7))


def test_a_silent_daemon_expires_once_and_a_beating_one_never(tmp_path: Path) -> None:
    clock = Clock()
    registry = Registry(Store(tmp_path), 10.0, clock)
    registry.grant(request("x", 0), "r")
    registry.grant(request("x", 1), "r")
    clock.now = 9.0
    registry.beat(beat(1, rank=0))
    clock.now = 12.0
    assert [daemon.rank for daemon in registry.expire()] == [1]
    assert registry.expire() == []
    assert [daemon.rank for daemon in registry.alive(common_pb2.ROLE_ACTOR, "r")] == [0]


def test_a_jump_of_the_wall_clock_expires_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(Store(tmp_path), 10.0)
    registry.grant(request("x"), "r")
    for jump in (3600.0, -3600.0):
        monkeypatch.setattr("time.time", lambda jump=jump: 1e9 + jump)
        assert registry.expire() == []


def test_terms_survive_a_restart_and_leases_are_extended_once(tmp_path: Path) -> None:
    async def first_life() -> None:
        store = Store(tmp_path)
        registry = Registry(store, 10.0, Clock())
        _, writes = registry.grant(request("x"), "r")
        await store.write(*writes)
        store.close()

    asyncio.run(first_life())
    clock = Clock()
    clock.now = 1000.0
    store = Store(tmp_path)
    assert store.own_term == 2
    registry = Registry(store, 10.0, clock)
    assert registry.expire() == []
    assert registry.grant(request("x"), "r")[0].term == 1
    assert registry.grant(request("y"), "r")[0].term == 2
    clock.now = 1011.0
    assert len(registry.expire()) == 1
