"""The record of a run that watchers see."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from relax_common.versions import PolicyVersion
from relaxd.disk import DiskWaits
from relaxd.run.drops import DropStreak
from relaxd.run.files import JsonLines
from relaxd.run.follower import RunFollower
from relaxd.run.live import LiveRun
from relaxd.run.state import Event, Phase, Progress, RunRecord
from relaxd.store import Store

SHOWN = Progress(head=PolicyVersion(1, 4), waits=("actor waits 2.0 s for rows",), rollbacks=("from 0.5 to 1.4: why",))


def with_live_run(folder: Path, story: Callable[[LiveRun], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        waits = DiskWaits()
        store = Store(folder, waits)
        live = LiveRun(RunRecord("r", "", str(folder), 9, created_ns=1), store, waits)
        await live.move(Event.OPENED)
        live.show(SHOWN)
        await story(live)
        await store.close()

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize(
    ("events", "phase"),
    [
        ((Event.DONE,), Phase.ENDED),
        ((Event.BROKEN,), Phase.FAILED),
        ((Event.STOP_ASKED, Event.SAVED), Phase.STOPPED),
    ],
)
def test_a_run_that_has_ended_shows_no_waits(tmp_path: Path, events: tuple[Event, ...], phase: Phase) -> None:
    async def story(live: LiveRun) -> None:
        assert live.record.progress.waits
        for event in events:
            await live.move(event)
        # Someone who has not heard of the end yet.
        live.show(SHOWN)
        assert live.record.phase is phase
        assert live.record.progress == Progress(head=SHOWN.head, rollbacks=SHOWN.rollbacks)
        assert list(live.record.to_proto().waits) == []
        assert [record.progress.waits async for record in live.watch()] == [()]

    with_live_run(tmp_path, story)


def test_rollbacks_are_told_with_their_reasons_also_by_a_relaxd_that_was_restarted(tmp_path: Path) -> None:
    events = [
        *({"source": "dcs", "revision": n + 1, "kind": "commit", "lineage": 0, "version": n} for n in range(6)),
        {"source": "dcs", "revision": 7, "kind": "rollback", "lineage": "1", "head": "4", "reason": "rows are gone"},
        {"source": "dcs", "revision": 8, "kind": "commit", "lineage": 1, "version": 5},
        {"source": "dcs", "revision": 9, "kind": "rollback", "lineage": "2", "head": "4", "reason": "again"},
    ]
    lines = JsonLines(tmp_path / "events.jsonl")
    for event in events:
        lines.append(event)
    lines.flush()
    lines.close()
    follower = RunFollower(tmp_path, lambda: None, DropStreak(0, 0), DiskWaits())
    follower.close()
    first, second = follower.rollbacks
    assert ("0.5" in first, "1.4" in first, "rows are gone" in first) == (True, True, True), first
    assert ("1.5" in second, "2.4" in second, "again" in second) == (True, True, True), second
