"""A disk refuses writes (injected faults): the call is refused with path and free space, the state stays as it was."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_common.errors import Exhausted
from relax_common.storage.framed_log import FramedLog
from relax_common.versions import PolicyVersion
from relax_queue.broker.run_broker import RunBroker
from relax_queue.rows.column_block import Column, decode, encode
from relax_queue.rows.facts import facts_of_rows, facts_of_samples
from relax_queue.rows.row_keys import keys_of_samples
from relax_queue.rows.spec import RunSpec
from relax_queue.rules import events as ev
from relax_queue.rules import following, leases, lifecycle
from relax_queue.rules.group import Group
from relax_queue.rules.puts import PutCommand, put
from relax_queue.storage import disk, payload_files, snapshots
from relax_queue.storage.disk import DiskSizes

BLOCK = encode({"reward": Column("sample", np.ones(1, np.float32))})
V0 = PolicyVersion(0, 0)
SPEC = RunSpec(
    fields=(), consumers=(), tokens_per_row_max=8, tokens_per_microbatch=8, data_parallel_size=1, prompts_per_step=2,
    samples_per_prompt=1, max_staleness=1, snapshot_every=1, groups_per_chunk=2, packer="token_budget",
    stale_policy="wait", min_valid_samples=1, max_refills_per_step=1, memory_budget_bytes=1 << 30,
    lease_ttl_seconds=60.0, durability="full",
)  # fmt: skip


async def begun(folder: Path, sizes: DiskSizes | None = None) -> tuple[RunBroker, Group]:
    run = await RunBroker.create(folder, ev.RunOpened("run", "digest", SPEC, "dcs"), sizes or DiskSizes())
    prompts = [ev.Prompt(f"g{i}", 0, i, "1", None, "") for i in range(4)]
    await run.transact(lambda d: lifecycle.offer(d, "relaxd", 1, prompts, 0))
    await run.transact(lambda d: following.commit(d, 1, None, (0, 0), (), ""))
    await run.transact(lambda d: following.confirm(d, 2, "a", 1, (0, 0)))
    group = await run.transact(lambda d: leases.grant(d, "a", 1))
    assert isinstance(group, Group)
    return run, group


async def store(run: RunBroker, group: Group) -> str:
    rows = facts_of_rows(keys_of_samples(group.id, [0]), [4], [{V0.pack(): 2}])
    samples = facts_of_samples([0], [True], [1.0])
    command = PutCommand("a", 1, group.id, group.attempts, rows, samples, ("reward",), len(BLOCK), "digest", "ok")

    def both(decision: Any) -> str:
        disposition, block = put(decision, command)
        if block is not None:
            run.keep(block, BLOCK)
            run.payload.add(block, len(BLOCK), decode(BLOCK))
        return disposition

    return await run.transact(both, wanted_bytes=len(BLOCK))


def image(run: RunBroker) -> list[bytes]:
    return list(snapshots.dump(snapshots.take_image(run.state)))


def refuse(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def go(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


@pytest.mark.parametrize(("cls", "method"), [(FramedLog, "append"), (payload_files.PayloadFiles, "write")])
def test_I1_a_put_that_cannot_be_written_is_refused_and_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cls: type, method: str
) -> None:
    async def story() -> None:
        run, group = await begun(tmp_path / "run")
        before = image(run)
        monkeypatch.setattr(cls, method, refuse)
        with pytest.raises(Exhausted) as full:
            await store(run, group)
        assert full.value.reason == "DISK_FULL"
        assert full.value.details["path"] == str(tmp_path / "run")
        assert int(full.value.details["free_bytes"]) > 0
        assert image(run) == before, "nothing half stored"
        assert run.state.bytes_held == 0
        monkeypatch.undo()
        assert await store(run, run.state.group(group.id)) == "accepted"
        run.close()
        again = await RunBroker.recover(tmp_path / "run", DiskSizes())
        assert again is not None
        assert image(again) == image(run), "and the log tells the same"
        again.close()

    go(story())


def test_without_room_a_lease_and_a_put_decide_nothing_but_the_dcs_log_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        run, group = await begun(tmp_path / "run")
        before = image(run)
        monkeypatch.setattr(disk, "free_bytes", lambda _: disk.RESERVE_BYTES - 1)
        with pytest.raises(Exhausted, match=rf"the disk below {tmp_path}/run has \d+ bytes free, \d+ are needed"):
            await run.transact(lambda d: leases.grant(d, "a", 1))
        with pytest.raises(Exhausted):
            await store(run, group)
        assert image(run) == before
        await run.transact(lambda d: following.commit(d, 3, 0, (0, 1), (), ""), reserve=True)
        assert run.state.head == 1
        monkeypatch.undo()
        assert await store(run, group) == "accepted"
        run.close()

    go(story())


def test_a_snapshot_that_finds_no_room_is_tried_again_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        monkeypatch.setattr(snapshots, "dump", refuse)
        run, group = await begun(tmp_path / "run", DiskSizes(segment_bytes=100))
        await store(run, group)
        while run.snapshotter.is_writing:
            await asyncio.sleep(0.01)
        assert run.journal.snapshot_bytes == 0
        monkeypatch.setattr(snapshots, "dump", dump)
        await run.transact(lambda d: leases.grant(d, "a", 1))
        while run.snapshotter.is_writing:
            await asyncio.sleep(0.01)
        assert run.journal.snapshot_bytes > 0
        run.close()
        again = await RunBroker.recover(tmp_path / "run", DiskSizes())
        assert again is not None
        assert image(again) == image(run)
        again.close()

    dump = snapshots.dump
    go(story())


def test_what_a_full_disk_holds_up_is_told_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        run, group = await begun(tmp_path / "run")
        assert run.disk_wait() is None
        with monkeypatch.context() as full:
            full.setattr(disk, "free_bytes", lambda folder: 5)
            assert run.disk_wait() is None, "nothing has been refused yet"
            with pytest.raises(Exhausted):
                await store(run, group)
            first = run.disk_wait()
            with pytest.raises(Exhausted):
                await store(run, group)
            assert first == run.disk_wait(), "it lasts since the first refusal"
            assert first is not None
            assert "has 5 bytes free" in first[0]
        assert run.disk_wait() is None
        assert await store(run, group) == "accepted"
        run.close()

    go(story())
