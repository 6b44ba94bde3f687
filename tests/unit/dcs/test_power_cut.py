"""After a power cut at any fsync of a story, everything that dcs acknowledged is there, with its newest state."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import xxhash
from power_cut import PowerCut

from dcs.client import SliceData
from dcs.runs import Runs
from dcs.store import verified_parts
from dcs.versions import Versions
from relax.dcs.v1 import dcs_pb2
from relax_common.errors import UnknownRun
from relax_common.storage.checkpoint_folder import find_checkpoints
from relax_common.storage.sealed_memory import sealed
from relax_common.versions import PolicyVersion

STEPS = 4


def request(folder: Path) -> dcs_pb2.OpenRunRequest:
    return dcs_pb2.OpenRunRequest(
        run="r",
        memory_budget_bytes=1 << 20,
        snapshot_every=1,
        snapshot_ranks={"actor": 1},
        recovery_on_disk=True,
        checkpoint=dcs_pb2.CheckpointPolicy(
            every_steps=2, folder=str(folder / "checkpoints"), keep=2, model_folder=str(folder / "model")
        ),
    )


class Story:
    """Steps of one run, in this process, and what its callers have been told. `keeps_up`: the disk is faster than
    training, so that each recovery copy is complete before the next version is committed."""

    def __init__(self, folder: Path, *, keeps_up: bool) -> None:
        self.folder = folder
        self.keeps_up = keeps_up
        self.run: Versions | None = None
        self.opened = False
        self.term = 0
        self.committed: list[dcs_pb2.CommitRecord] = []
        self.confirmed: PolicyVersion | None = None

    async def tell(self) -> None:
        runs = Runs(self.folder / "state")
        await runs.open(request(self.folder))
        self.opened = True
        run = self.run = runs.get("r")
        self.term = await run.fence("actor", 1)
        for _ in range(STEPS):
            await self.step(run)
            if self.keeps_up:
                await run.recovery.finish_writing()
        await run.recovery.finish_writing()

    def on_disk(self) -> int:
        """The newest version whose state the disk is said to hold."""
        return self.run.recovery.on_disk().number if self.run is not None else 0

    async def step(self, run: Versions) -> None:
        version = PolicyVersion(0, run.line.next_number)
        attempt = await run.begin("actor", version, 1)
        data = bytes([version.number]) * 16
        entry = SliceData("w", (2, 2), (0, 0), (2, 2), "F32", data).to_proto()
        header = dcs_pb2.PushHeader(run="r", version=version.to_proto(), attempt=attempt, term=1, slices=[entry])
        run.check_push(header)
        run.store_slices(header, verified_parts(header, sealed([data])))
        record = dcs_pb2.CommitRecord(version=version.to_proto(), term=1, attempt=attempt)
        self.committed.append((await run.commit(record))[1])
        if version.number:
            await self.snapshot(run, version, attempt)
        await run.confirm(dcs_pb2.ConfirmedRecord(server="rollout-0", term=1, version=version.to_proto()))
        self.confirmed = version

    async def snapshot(self, run: Versions, version: PolicyVersion, attempt: int) -> None:
        state = b"state %d" % version.number
        header = dcs_pb2.SnapshotHeader(
            run="r",
            version=version.to_proto(),
            attempt=attempt,
            role="actor",
            rank=0,
            term=1,
            size_bytes=len(state),
            hash=xxhash.xxh3_64_intdigest(state),
        )
        await run.put_snapshot(header, sealed([state]))


@dataclass(frozen=True)
class Told:
    """What callers had been told when the power went. `committed`: number of commits."""

    opened: bool
    term: int
    committed: int
    on_disk: int


def check(image: Path, told: Told, records: list[dcs_pb2.CommitRecord]) -> None:
    runs = Runs(image / "state")
    try:
        run = runs.get("r")
    except UnknownRun:
        assert not told.opened
        return
    assert run.line.terms.of("actor") >= told.term
    assert len(run.line.commits) >= told.committed
    for number in range(told.committed):
        assert run.log.record(run.line.commits[number].revision).commit == records[number]
    point = run.recovery.point()
    announced = run.line.announced
    if announced is not None:
        assert point.version.number >= announced.number, "the queue has freed what a replay would need"
    assert point.version.number >= told.on_disk
    assert told.committed - 1 - point.version.number <= 1, "snapshot_every is 1"
    if point.version.number:
        state = run.recovery.state(point.version, "actor", 0)[1]
        assert bytes(state) == b"state %d" % point.version.number
    for found in find_checkpoints(image / "checkpoints"):
        assert not found.fault
    run.log.close()


@pytest.mark.parametrize("keeps_up", [False, True])
@pytest.mark.parametrize("removals_early", [False, True])
def test_what_was_acknowledged_survives_a_power_cut_at_every_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removals_early: bool, keeps_up: bool
) -> None:
    root = tmp_path / "disk"
    cut = PowerCut(root, removals_early=removals_early)
    (root / "model").mkdir()
    (root / "model" / "config.json").write_text("{}")
    story = Story(root, keeps_up=keeps_up)
    images: list[tuple[Path, Told]] = []

    def note() -> None:
        image = tmp_path / f"image-{len(images)}"
        images.append((image, Told(story.opened, story.term, len(story.committed), story.on_disk())))
        cut.write_to(image)

    cut.on_fsync = note
    with cut.installed(monkeypatch):
        asyncio.run(story.tell())
    assert len(images) > 20
    for image, told in images:
        check(image, told, story.committed)
