"""After a power cut at any fsync, whatever was acknowledged before it is there: log, snapshots, payload, blobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from power_cut import Image, PowerCut

from relax_common.versions import PolicyVersion
from relax_queue.broker.broker import Broker
from relax_queue.broker.run_broker import RunBroker
from relax_queue.rows.column_block import Column, decode, encode
from relax_queue.rows.facts import facts_of_rows, facts_of_samples
from relax_queue.rows.row_keys import keys_of_samples
from relax_queue.rows.spec import RunSpec
from relax_queue.rules import events as ev
from relax_queue.rules import following, leases, lifecycle
from relax_queue.rules.group import Group, Status
from relax_queue.rules.puts import PutCommand, put
from relax_queue.rules.transaction import fence
from relax_queue.storage.disk import DiskSizes

SIZES = DiskSizes(segment_bytes=2500, history_bytes=0, payload_file_bytes=2000)
STEPS = 6
SPEC = RunSpec(
    fields=(), consumers=(), tokens_per_row_max=8, tokens_per_microbatch=8, data_parallel_size=1, prompts_per_step=1,
    samples_per_prompt=1, max_staleness=1, snapshot_every=1, groups_per_chunk=1, packer="token_budget",
    stale_policy="wait", min_valid_samples=1, max_refills_per_step=1, memory_budget_bytes=1 << 30,
    lease_ttl_seconds=60.0, durability="full",
)  # fmt: skip

Check = Callable[[Broker, RunBroker], None]


@dataclass
class Journey:
    """Checks of what was acknowledged; and for every fsync an image of the disk, with the number of checks by then."""

    cut: PowerCut
    acknowledged: list[Check] = field(default_factory=list)
    images: list[tuple[int, Image]] = field(default_factory=list)

    def at_fsync(self) -> None:
        self.images.append((len(self.acknowledged), self.cut.image()))


def rows_of(step: int) -> bytes:
    return encode({"reward": Column("sample", np.full(200, step, np.float32))})


async def complete(run: RunBroker, group: Group, step: int) -> None:
    content = rows_of(step)
    rows = facts_of_rows(keys_of_samples(group.id, [0]), [4], [{PolicyVersion(0, max(step - 1, 0)).pack(): 2}])
    samples = facts_of_samples([0], [True], [1.0])
    command = PutCommand("a", 1, group.id, group.attempts, rows, samples, ("reward",), len(content), group.id, "ok")

    def both(decision: Any) -> str:
        disposition, block = put(decision, command)
        assert block is not None
        run.keep(block, content)
        run.payload.add(block, len(content), decode(content))
        return disposition

    assert await run.transact(both, wanted_bytes=len(content)) == "accepted"


def is_offered(group: str) -> Check:
    def check(_: Broker, run: RunBroker) -> None:
        assert run.state.status_of(group) is not None, f"the offer of {group} was acknowledged"

    return check


def has_rows(group: str, step: int) -> Check:
    def check(_: Broker, run: RunBroker) -> None:
        found = run.state.groups.get(group)
        if found is None or found.status is Status.TRAINED:
            return
        assert found.status in (Status.READY, Status.PLANNED), f"the put of {group} was acknowledged"
        (part,) = found.parts
        assert run.payload.block(part.block).columns["reward"].values[0] == step

    return check


def is_followed(revision: int) -> Check:
    return lambda _, run: _at_least(run.state.applied_revision, revision)


def _at_least(found: int, wanted: int) -> None:
    assert found >= wanted


def knows_term(holder: str, term: int) -> Check:
    return lambda _, run: _at_least(run.state.terms.of(holder), term)


def has_blob(name: str, content: bytes) -> Check:
    def check(_: Broker, run: RunBroker) -> None:
        assert run.blobs.get(name) == content

    return check


async def live(broker: Broker, journey: Journey) -> None:
    said = journey.acknowledged
    run = await broker.open(ev.RunOpened("run", "digest", SPEC, "127.0.0.1:1"))
    said.append(lambda broker, run: None)
    revision = 0

    async def follow(command: Any) -> None:
        nonlocal revision
        revision += 1
        await run.transact(lambda d, r=revision: command(d, r), reserve=True)
        said.append(is_followed(revision))

    await follow(lambda d, r: following.commit(d, r, None, (0, 0), (), ""))
    await run.transact(lambda d: fence(d, "actor", 1), reserve=True)
    said.append(knows_term("actor", 1))
    for step in range(STEPS):
        image = f"image {step}".encode() * 50
        name = xxhash.xxh3_128_hexdigest(image)
        await asyncio.to_thread(run.blobs.put, name, image)
        said.append(has_blob(name, image))
        prompt = ev.Prompt(f"g{step}", 0, step, "1" * 100, None, "", blobs=(name,))
        await run.transact(lambda d, p=prompt: lifecycle.offer(d, "relaxd", 1, [p], 0))
        said[-1] = is_offered(prompt.group)
        await follow(lambda d, r, s=step: following.confirm(d, r, "a", 1, (0, max(s - 1, 0))))
        group = await run.transact(lambda d: leases.grant(d, "a", 1))
        assert isinstance(group, Group)
        await complete(run, group, step)
        said.append(has_rows(group.id, step))
        plan = run.state.plan
        assert plan is not None
        assert plan.close is not None
        digest = plan.close.plan_digest
        await follow(lambda d, r, s=step, g=digest: following.commit(d, r, s, (0, s + 1), (f"g{s}",), g))
        await follow(lambda d, r, s=step: following.frontier(d, r, s + 1))
        while run.snapshotter.is_writing:
            await asyncio.sleep(0)
    broker.close()


async def recovered(folder: Path) -> tuple[Broker, RunBroker | None]:
    broker = Broker(folder, SIZES)
    serving = asyncio.create_task(broker.serve())
    while not broker._recovered:
        assert not serving.done(), serving.exception()
        await asyncio.sleep(0)
    serving.cancel()
    return broker, next(iter(broker.runs()), None)


@pytest.mark.parametrize("removals_early", [False, True])
def test_I1_what_was_acknowledged_survives_a_power_cut_at_every_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removals_early: bool
) -> None:
    journey = Journey(PowerCut(tmp_path / "state", removals_early))
    journey.cut.on_fsync = journey.at_fsync

    async def first_life() -> None:
        broker = Broker(tmp_path / "state", SIZES)
        serving = asyncio.create_task(broker.serve())
        await asyncio.sleep(0)
        await live(broker, journey)
        serving.cancel()

    with journey.cut.installed(monkeypatch):
        asyncio.run(first_life())
    assert len(journey.images) > 50, "kill points"

    async def second_life(folder: Path, checks: list[Check]) -> None:
        broker, run = await recovered(folder)
        if run is None:
            assert not checks, "the run was acknowledged"
        else:
            for check in checks:
                check(broker, run)
        broker.close()

    for i, (acknowledged, image) in enumerate(journey.images):
        folder = tmp_path / f"after-{i}"
        image.write_to(folder)
        asyncio.run(second_life(folder, journey.acknowledged[:acknowledged]))


def test_the_cut_forgets_what_was_not_fsynced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    root = tmp_path / "disk"
    cut = PowerCut(root)
    with cut.installed(monkeypatch):
        (root / "lost").write_bytes(b"never fsynced")
        with (root / "kept").open("wb") as file:
            file.write(b"one")
            file.flush()
            os.fsync(file.fileno())
            file.write(b"two")
        folder = os.open(root, os.O_RDONLY)
        os.fsync(folder)
        (root / "kept").rename(root / "renamed")
        (root / "lost").unlink()
        os.close(folder)
        cut.write_to(tmp_path / "after")
    assert {p.name: p.read_bytes() for p in (tmp_path / "after").iterdir()} == {"kept": b"one", "lost": b""}
