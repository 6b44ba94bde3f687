"""A grant that was on its way when its rollout server stopped listening is returned with the others."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from relax_queue.client import AioQueueClient
from rollout_server.engines.contract import Engine
from rollout_server.groups import runner as leasing
from rollout_server.groups.runner import GroupRunner, Sizes
from rollout_server.version_follower import Holder, VersionFollower
from rollout_server.workflows.base import Workflow


@pytest.fixture
def bench(shared_queue: Any, dcs: Any, make_bench: Any) -> Iterator[Any]:
    made = make_bench(shared_queue, dcs, f"run-{time.monotonic_ns()}", "auto")
    made.begin(4, max_staleness=3)
    yield made
    made.client.close()


def idle(queue: AioQueueClient) -> GroupRunner:
    """The runner of a server without groups in work, so that it needs neither engine nor versions."""
    nothing = cast(Any, None)
    sizes = Sizes(groups_at_a_time=4, min_valid_samples=2, lease_ttl_seconds=30.0)
    holder = Holder("s", 1)
    return GroupRunner(
        queue, cast(VersionFollower, nothing), cast(Engine, nothing), cast(Workflow, nothing), holder, sizes
    )


def test_I1_a_server_that_drains_gives_back_what_was_granted_and_never_arrived(bench: Any) -> None:
    known, lost = bench.lease(), bench.lease(2)

    async def work() -> int:
        queue = AioQueueClient(bench.queue.address, bench.run)
        keys = [(lease.group.group, lease.attempt) for lease in (*known, *lost)]
        assert await queue.lost_grants("s", 1, keys, 5.0) == []
        assert await queue.lost_grants("s", 1, keys[:1], 5.0) == keys[1:]
        assert await queue.lost_grants("another", 1, [], 5.0) == []
        returned = await idle(queue).drain(0.0)
        await queue.close()
        return returned

    assert asyncio.run(work()) == 3
    counts = bench.client.status().counts
    assert (counts.leased, counts.leases_lost, counts.pending) == (0, 0, 4)


def test_I1_a_grant_that_a_cancelled_stream_did_not_deliver_is_found(bench: Any) -> None:
    async def work() -> list[tuple[str, int]]:
        queue = AioQueueClient(bench.queue.address, bench.run)
        stream = queue.lease_groups("s", 1, 3, 10.0)
        first = await anext(stream)
        with contextlib.suppress(asyncio.CancelledError):
            await stream.aclose()
        found = await queue.lost_grants("s", 1, [(first.group.group, first.attempt)], 5.0)
        await queue.close()
        return found

    assert asyncio.run(work()) == [("g1", 1), ("g2", 1)]
    assert bench.client.status().counts.leased == 3


def test_a_server_whose_queue_is_gone_does_not_wait_for_it_to_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "LEASE_SECONDS", 0.3)

    async def work() -> int:
        queue = AioQueueClient("127.0.0.1:1", "run")
        async with asyncio.timeout(10.0):
            returned = await idle(queue).drain(0.0)
        await queue.close()
        return returned

    assert asyncio.run(work()) == 0
