"""A writer waits, by name, while the disk is full, and then goes on; nothing is torn, lost or written twice."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from pathlib import Path

import pytest

from relax_common.errors import RelaxError
from relaxd import disk
from relaxd.disk import DiskWaits, has_no_room
from relaxd.run.files import JsonLines, read_lines
from relaxd.store import Store, new_event

SECONDS = 10.0


def no_room(*_: object) -> int:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    raise error


def test_a_writer_without_room_is_named_until_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "RETRY_SECONDS", 0.0)

    async def story() -> None:
        waits = DiskWaits()
        room = asyncio.Event()

        async def write() -> str:
            if not room.is_set():
                raise OSError(errno.ENOSPC, "No space left on device")
            return "written"

        held = asyncio.create_task(waits.hold("events.jsonl", write))
        for _ in range(5):
            await asyncio.sleep(0)
        assert waits.lines() == ["relaxd waits for room on the disk to write events.jsonl"]
        room.set()
        assert await asyncio.wait_for(held, SECONDS) == "written"
        assert waits.lines() == []

    asyncio.run(story())


@pytest.mark.parametrize(
    "error", [OSError(errno.EACCES, "Permission denied"), sqlite3.OperationalError("no such table")]
)
def test_what_waiting_cannot_mend_is_raised_at_once(error: Exception) -> None:
    async def story() -> None:
        async def write() -> None:
            raise error

        with pytest.raises(type(error)):
            await asyncio.wait_for(DiskWaits().hold("x", write), SECONDS)

    assert not has_no_room(error)
    asyncio.run(story())


def test_lines_that_found_no_room_are_written_whole_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = JsonLines(tmp_path / "events.jsonl")
    lines.append({"n": 0})
    lines.flush()
    real = os.pwrite

    def short(fd: int, data: memoryview, offset: int) -> int:
        """Takes a few bytes and then has no room for the rest."""
        if offset > lines_size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[:3], offset)

    lines_size = (tmp_path / "events.jsonl").stat().st_size
    lines.append({"n": 1})
    monkeypatch.setattr(os, "pwrite", short)
    with pytest.raises(OSError, match="No space left"):
        lines.flush()
    assert [line["n"] for line in read_lines(tmp_path / "events.jsonl")] == [0]
    lines.append({"n": 2})
    monkeypatch.setattr(os, "pwrite", real)
    lines.flush()
    lines.close()
    assert [line["n"] for line in read_lines(tmp_path / "events.jsonl")] == [0, 1, 2]


def test_an_event_that_could_not_be_written_leaves_no_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "RETRY_SECONDS", 0.0)

    async def story() -> None:
        waits = DiskWaits()
        store = Store(tmp_path, waits)
        await store.write(event=new_event("a", "", {}))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("relaxd.store._apply", no_room)
            with pytest.raises(RelaxError, match="no room below"):
                await store.write(event=new_event("lost", "", {}))
            store.write_later("its events", event=new_event("b", "", {}))
            while not waits.lines():
                await asyncio.sleep(0.01)
            assert [event.kind for event in store.events] == ["a"]
        followed = store.watch(1)
        assert (await asyncio.wait_for(anext(followed), SECONDS)).kind == "b"
        await store.close()
        again = Store(tmp_path, waits)
        assert [(event.revision, event.kind) for event in again.events] == [(1, "a"), (2, "b")]
        await again.close()

    asyncio.run(asyncio.wait_for(story(), SECONDS))
