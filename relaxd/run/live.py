"""The only owner of a run's record: it changes the disk, then memory, then tells the watchers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from relaxd.disk import DiskWaits
from relaxd.run.state import FINAL, Event, Progress, RunRecord, phase_after
from relaxd.store import Bell, NewEvent, Store, put_run


class LiveRun:
    def __init__(self, record: RunRecord, store: Store, waits: DiskWaits) -> None:
        self._record = record
        self._store = store
        self._waits = waits
        self._moving = asyncio.Lock()
        self._changed = Bell()

    @property
    def record(self) -> RunRecord:
        return self._record

    @property
    def final(self) -> bool:
        return self._record.phase in FINAL

    async def move(
        self,
        event: Event,
        *,
        error: str = "",
        total_steps: int = 0,
        recipe_toml: str = "",
        told: NewEvent | None = None,
    ) -> RunRecord:
        """Apply `event` to the run; returns once that is on disk. Raises Unavailable if the disk has no room."""
        async with self._moving:
            now = self._record
            phase = phase_after(now.phase, event)
            record = replace(
                now,
                phase=phase,
                error=error,
                total_steps=total_steps or now.total_steps,
                recipe_toml=recipe_toml or now.recipe_toml,
            )
            if phase in FINAL:
                # Nobody waits for anything in a run that has ended.
                record = replace(record, progress=replace(now.progress, waits=()))
            if record != now or told is not None:
                await self._store.write(put_run(record.to_proto(), ""), event=told)
                # What was shown during the write is newer than what was read before it.
                shown = record.progress if phase in FINAL else self._record.progress
                self._set(replace(record, progress=shown))
        return self._record

    async def move_when_possible(self, event: Event, error: str = "") -> None:
        """The same for relaxd itself: it waits, and reports the wait, until the disk has room."""
        await self._waits.hold(f"that the run is {event.value}", lambda: self.move(event, error=error))

    def show(self, progress: Progress) -> None:
        """Show news that are not stored, and so do not wait for the disk."""
        if progress != self._record.progress and not self.final:
            self._set(replace(self._record, progress=progress))

    def _set(self, record: RunRecord) -> None:
        self._record = replace(record, revision=self._record.revision + 1)
        self._changed.ring()

    async def watch(self) -> AsyncIterator[RunRecord]:
        """Yields the record now and after each change, until the run has ended."""
        while True:
            record = self._record
            yield record
            if record.phase in FINAL:
                return
            if record.revision == self._record.revision:
                await self._changed.wait()
