"""A run on its event loop: what happens when a caller goes away, and which calls are checked after a change."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from pathlib import Path

import pytest

from relax_queue.broker.run_broker import RunBroker
from relax_queue.broker.waits import Waits
from relax_queue.rows.spec import RunSpec
from relax_queue.rules import events as ev
from relax_queue.rules import following, leases, lifecycle
from relax_queue.rules.group import Status
from relax_queue.rules.transaction import fence
from relax_queue.storage.disk import DiskSizes
from relax_queue.storage.journal import Journal

SPEC = RunSpec(
    fields=(), consumers=(), tokens_per_row_max=8, tokens_per_microbatch=8, data_parallel_size=1, prompts_per_step=2,
    samples_per_prompt=1, max_staleness=1, snapshot_every=1, groups_per_chunk=2, packer="token_budget",
    stale_policy="wait", min_valid_samples=1, max_refills_per_step=1, memory_budget_bytes=1 << 30,
    lease_ttl_seconds=0.1,
)  # fmt: skip


def test_I5_a_lease_whose_server_went_away_before_it_was_durable_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        run = await RunBroker.create(tmp_path / "run", ev.RunOpened("run", "digest", SPEC, "dcs"), DiskSizes())
        await run.transact(lambda d: lifecycle.offer(d, "relaxd", 1, [ev.Prompt("g", 0, 0, "1", None, "")], 0))
        await run.transact(lambda d: following.commit(d, 1, None, (0, 0), (), ""))
        await run.transact(lambda d: following.confirm(d, 2, "a", 1, (0, 0)))
        sync = Journal.sync
        slow = asyncio.Event()

        async def slow_sync(journal: Journal) -> bool:
            await slow.wait()
            return await sync(journal)

        monkeypatch.setattr(Journal, "sync", slow_sync)
        call = asyncio.create_task(run.transact(lambda d: leases.grant(d, "a", 1)))
        await asyncio.sleep(0)
        assert run.state.group("g").status is Status.LEASED
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        slow.set()
        async with asyncio.timeout(5):
            while run.state.group("g").status is not Status.PENDING:
                await asyncio.sleep(0.01)
        await run.transact(lambda d: lifecycle.seal(d))
        run.close()

    asyncio.run(story())


def test_a_lease_that_is_over_ends_no_later_one_and_has_no_age(tmp_path: Path) -> None:
    async def story() -> None:
        spec = replace(SPEC, lease_ttl_seconds=600.0)
        run = await RunBroker.create(tmp_path / "run", ev.RunOpened("run", "digest", spec, "dcs"), DiskSizes())
        await run.transact(lambda d: lifecycle.offer(d, "relaxd", 1, [ev.Prompt("g", 0, 0, "1", None, "")], 0))
        await run.transact(lambda d: following.commit(d, 1, None, (0, 0), (), ""))
        await run.transact(lambda d: following.confirm(d, 2, "a", 1, (0, 0)))
        await run.transact(lambda d: leases.grant(d, "a", 1))
        await asyncio.sleep(0.01)
        assert run.timers.oldest_lease_seconds >= 0.01
        await run.transact(lambda d: fence(d, "a", 2))
        assert run.timers.oldest_lease_seconds == 0
        await run.transact(lambda d: following.confirm(d, 3, "a", 2, (0, 0)))
        second = time.monotonic()  # the event loop's clock
        await run.transact(lambda d: leases.grant(d, "a", 2))
        assert 0 < run.timers.oldest_lease_seconds <= time.monotonic() - second
        run.timers._run_out(("g", 1))  # the clock of the first lease
        await asyncio.gather(*run._tasks)
        group = run.state.group("g")
        assert (group.status, group.attempts, group.leases_lost) == (Status.LEASED, 2, 1)
        run.close()

    asyncio.run(story())


def test_waits_for_the_same_are_looked_at_once_and_all_go_on() -> None:
    async def story() -> None:
        waits, there, looks = Waits("run"), set[int](), 0

        def ready(wanted: int) -> int | None:
            nonlocal looks
            looks += 1
            return wanted if wanted in there else None

        end = time.monotonic() + 5
        calls = [
            asyncio.create_task(waits.until("GetPlan", "actor", lambda n=n: ready(n), str, end, same=("chunk", n)))  # type: ignore[misc]
            for n in (1, 1, 1, 2, 2)
        ]
        await asyncio.sleep(0)
        assert (looks, len(waits.in_progress())) == (5, 5)
        there.add(1)
        waits.changed()
        assert await asyncio.gather(*calls[:3]) == [1, 1, 1]
        assert looks == 5 + 2 + 3, "one look for each of two chunks, and the three that go on look again"
        there.add(2)
        waits.changed()
        assert await asyncio.gather(*calls[3:]) == [2, 2]

    asyncio.run(story())
