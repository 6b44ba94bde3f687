"""The log of a run in segments with snapshots: bounded, and whole at whatever point the process died."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from relax_common.errors import DataLoss, Precondition
from relax_common.storage.framed_log import FramedLog
from relax_common.versions import PolicyVersion
from relax_queue.broker.public_events import messages_after
from relax_queue.rules import events as ev
from relax_queue.rules import following, lifecycle
from relax_queue.rules.apply import fold
from relax_queue.rules.state import RunState
from relax_queue.storage import journal
from relax_queue.storage.disk import DiskSizes
from relax_queue.storage.journal import Journal
from relax_queue.storage.segments import find_segments, find_snapshots
from relax_queue.storage.snapshots import take_image

ARROWS = [
    "queue.before_rotate",
    "queue.after_rotate",
    "queue.snapshot_before_fsync",
    "queue.snapshot_before_rename",
    "queue.snapshot_before_compaction",
    "queue.compaction_midway",
]


class Died(Exception):
    """Takes the place of the end of the process."""


class Disk:
    """A story whose transactions go to a journal; `die` reads everything back from the folder."""

    def __init__(self, folder: Path, story: Any) -> None:
        self.folder = folder
        self.story = story
        self.sizes = DiskSizes()
        self.journal = Journal(folder)
        base, later = self.journal.recover()
        assert (base, list(later)) == (None, [])
        self.written = 0
        self.step = 0
        self.replayed = 0

    def write(self) -> None:
        for transaction in self.story.log[self.written :]:
            self.journal.append(list(transaction.events))
        self.written = len(self.story.log)

    def train_a_step(self) -> None:
        """One group from the pending queue to the frontier."""
        story, step = self.story, self.step
        story.do(lambda d: lifecycle.offer(d, "relaxd", 1, [ev.Prompt(f"p{step}", 0, 0, "1" * 50, None, "")], 0))
        story.confirm("a", PolicyVersion(0, step))
        group = story.make(PolicyVersion(0, step))
        story.commit(step + 1, (group.id,), story.digest())
        story.record(following.frontier, step + 1)
        self.step += 1
        self.write()

    def snapshot(self) -> None:
        revision = self.journal.rotate()
        self.journal.write_snapshot(revision, take_image(self.story.state))
        self.journal.compact()

    def die(self) -> RunState:
        self.journal.close()
        self.journal = Journal(self.folder, sizes=self.sizes)
        base, later = self.journal.recover()
        transactions = list(later)
        self.replayed = len(transactions)
        state = fold(transactions, base)
        assert state is not None
        return state

    @property
    def size(self) -> int:
        return sum(p.stat().st_size for p in self.folder.iterdir())


@pytest.fixture
def disk(tmp_path: Path, new_story: Any) -> Disk:
    return Disk(tmp_path / "run", new_story(groups=0, max_staleness=0))


def test_a_restart_reads_the_newest_snapshot_and_only_the_log_after_it(disk: Disk) -> None:
    for step in range(7):
        disk.train_a_step()
        if step in (2, 4):
            disk.snapshot()
    assert disk.die() == disk.story.state
    replayed = disk.replayed
    assert replayed < disk.written / 2
    disk.train_a_step()
    assert disk.die() == disk.story.state
    assert disk.replayed > replayed


@pytest.mark.parametrize("arrow", ARROWS)
def test_I1_a_crash_at_any_arrow_of_a_snapshot_loses_nothing(
    disk: Disk, arrow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        disk.train_a_step()
        disk.snapshot()
    disk.train_a_step()

    def die_here(name: str) -> None:
        if name == arrow:
            raise Died(name)

    monkeypatch.setattr(journal, "failpoint", die_here)
    with pytest.raises(Died):
        disk.snapshot()
    monkeypatch.undo()
    assert disk.die() == disk.story.state
    assert not list(disk.folder.glob("*.tmp"))
    disk.train_a_step()
    disk.snapshot()
    disk.train_a_step()
    assert disk.die() == disk.story.state


def test_the_log_and_a_restart_do_not_grow_with_the_run(disk: Disk) -> None:
    disk.sizes = DiskSizes(segment_bytes=20_000, history_bytes=40_000)
    disk.write()
    disk.die()
    sizes, replayed = [], []
    for step in range(400):
        disk.train_a_step()
        if disk.journal.wants_snapshot:
            disk.snapshot()
        if step % 100 == 99:
            assert disk.die() == disk.story.state
            sizes.append(disk.size)
            replayed.append(disk.replayed)
    log = sum(s.path.stat().st_size for s in find_segments(disk.folder))
    assert log < 40_000 + 4 * 25_000, "segments: history, two snapshots' worth, the active one"
    settled = [snapshot.stat().st_size for _, snapshot in find_snapshots(disk.folder)]
    assert max(settled) < 400 * 120, "a group that has ended costs a hundred bytes with its stored answer"
    assert max(replayed) < 150, "of 2400 transactions"
    assert len(disk.story.state.groups) < 5


def test_a_torn_tail_is_cut_and_a_hole_is_refused(disk: Disk) -> None:
    disk.train_a_step()
    disk.snapshot()
    disk.train_a_step()
    disk.journal.rotate()
    disk.train_a_step()
    segments = find_segments(disk.folder)
    whole = segments[-1].path.read_bytes()
    copy = disk.folder.with_name("copy")
    assert len(segments) == 3
    shutil.copytree(disk.folder, copy)
    segments[-1].path.write_bytes(whole + whole[:21])
    assert disk.die() == disk.story.state
    cut = find_segments(copy)[1].path
    cut.write_bytes(cut.read_bytes()[:-5])
    with pytest.raises(DataLoss, match=r"it begins with revision \d+, but the log before it ends with"):
        list(Journal(copy).recover()[1])
    cut.unlink()
    with pytest.raises(DataLoss, match="is missing; restore it from a copy"):
        list(Journal(copy).recover()[1])


def test_a_damaged_snapshot_is_passed_over_for_the_one_before_it(disk: Disk) -> None:
    for _ in range(3):
        disk.train_a_step()
        disk.snapshot()
    newest = find_snapshots(disk.folder)[-1][1]
    content = bytearray(newest.read_bytes())
    content[100] ^= 1
    newest.write_bytes(content)
    assert disk.die() == disk.story.state
    assert disk.replayed > 3


def test_watchers_read_closed_segments_and_are_told_what_is_compacted(disk: Disk) -> None:
    for _ in range(6):
        disk.train_a_step()
        disk.snapshot()
    disk.die()
    asyncio.run(disk.journal.sync())
    seen, revision = [], 0
    while disk.journal.has_after(revision):
        messages, revision = messages_after(disk.journal, revision)
        seen += [(m.kind, m.group) for m in messages]
    assert [m for m in seen if m[0] == "trained"] == [("trained", f"p{i}") for i in range(6)]
    disk.sizes = DiskSizes(history_bytes=0)
    disk.die()
    disk.train_a_step()
    disk.snapshot()
    with pytest.raises(Precondition) as gone:
        messages_after(disk.journal, 0)
    assert gone.value.reason == "EVENTS_COMPACTED"
    first = int(gone.value.details["first_revision"])
    asyncio.run(disk.journal.sync())
    assert messages_after(disk.journal, first - 1)[0]


def test_concurrent_callers_share_one_flush_and_the_payload_goes_first(tmp_path: Path, new_story: Any) -> None:
    order: list[str] = []
    log = Journal(tmp_path / "run", lambda: order.append("payload"))
    assert list(log.recover()[1]) == []

    async def several() -> None:
        log.append([ev.RunSealed()])
        await asyncio.gather(*(log.sync() for _ in range(8)))

    asyncio.run(several())
    assert order == ["payload"]
    assert log.is_durable
    log.close()


def test_a_quick_disk_is_flushed_on_the_event_loop_and_a_slow_one_in_a_thread(tmp_path: Path) -> None:
    threads: list[threading.Thread] = []
    pace = journal.Pace()
    assert not pace.is_quick, "of a disk that is not known"
    log = Journal(tmp_path / "run", lambda: threads.append(threading.current_thread()))
    assert list(log.recover()[1]) == []

    async def append() -> bool:
        log.append([ev.RunSealed()])
        await log.sync()
        return threads[-1] is threading.main_thread()

    async def story() -> None:
        for seconds, on_loop in ((0.1, False), (0.0, True), (0.1, False)):
            for _ in range(40):
                log._pace.note(seconds)
            assert await append() is on_loop

    asyncio.run(story())
    log.close()


def test_a_flush_that_fails_is_told_to_all_who_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    log = Journal(tmp_path / "run")
    assert list(log.recover()[1]) == []
    monkeypatch.setattr(FramedLog, "flush", fail)

    async def story() -> list[Any]:
        log.append([ev.RunSealed()])
        gone = asyncio.create_task(log.sync())
        calls = [asyncio.create_task(log.sync()) for _ in range(2)]
        await asyncio.sleep(0)
        gone.cancel()
        return await asyncio.gather(*calls, return_exceptions=True)

    for seconds in (0.0, 0.1):
        for _ in range(40):
            log._pace.note(seconds)
        assert [error.errno for error in asyncio.run(story())] == [errno.EIO] * 2
    assert not log.is_durable
    log.close()
