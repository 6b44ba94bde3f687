"""What the follower does with an engine that does not return from a swap."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from relax.dcs.v1 import dcs_pb2
from relax_common.versions import PolicyVersion
from rollout_server.engines.contract import EngineError, PauseMode, StagedWeights, SwapReport, Tolerance
from rollout_server.version_follower import Holder, VersionFollower

COMMIT = dcs_pb2.CommitRecord(version=PolicyVersion(0, 0).to_proto())


class OneVersion:
    """A dcs whose log holds one commit."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def watch_log(self, revision: int, seconds: float) -> Iterator[dcs_pb2.LogRecord]:
        yield dcs_pb2.LogRecord(revision=1, commit=COMMIT)
        self.ended.wait(20)

    def pull(self, version: PolicyVersion) -> list[tuple[dcs_pb2.Slice, bytes]]:
        return []


class Stuck:
    """An engine that takes a version and says nothing more."""

    def __init__(self) -> None:
        self.swaps = 0

    def ready(self) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def swap(self, staged: StagedWeights, mode: PauseMode) -> Future[SwapReport]:
        self.swaps += 1
        return Future()

    def health(self) -> Any:
        return SimpleNamespace(detail="stuck")


def test_a_swap_is_given_up_after_the_recipes_time_and_the_third_ends_the_server() -> None:
    dcs, engine = OneVersion(), Stuck()
    tolerance = Tolerance(1.0, 1.0)
    follower = VersionFollower(dcs, engine, Holder("s", 1), PauseMode.RETRACT, 0.05, tolerance)  # type: ignore[arg-type]

    async def follow() -> None:
        log = asyncio.create_task(follower.follow_log())
        try:
            await asyncio.wait_for(follower.keep_current(), 20)
        finally:
            dcs.ended.set()
            log.cancel()

    with pytest.raises(EngineError, match=r"the swap to version 0\.0 did not end within 0\.05 s"):
        asyncio.run(follow())
    assert engine.swaps == 3
