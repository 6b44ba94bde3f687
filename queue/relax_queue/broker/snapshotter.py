"""Snapshots of one run, written in a thread when a segment of the log has grown large."""

import asyncio

from relax_common.process.telemetry import get_logger
from relax_queue.rules.state import RunState
from relax_queue.storage.journal import Journal
from relax_queue.storage.snapshots import Image, take_image


class Snapshotter:
    """Writes one snapshot at a time. After a failure the log only grows, so the next segment tries again."""

    def __init__(self, state: RunState, journal: Journal) -> None:
        self._state = state
        self._journal = journal
        self._writing: asyncio.Task[None] | None = None

    @property
    def is_writing(self) -> bool:
        return self._writing is not None

    def begin_if_due(self) -> None:
        if self.is_writing or not self._journal.wants_snapshot:
            return
        try:
            revision = self._journal.rotate()
        except OSError as error:
            get_logger().error("segment_not_begun", run=self._state.run, error=str(error))
            return
        self._writing = asyncio.create_task(self._write(revision, take_image(self._state)))

    async def _write(self, revision: int, image: Image) -> None:
        try:
            await asyncio.to_thread(self._journal.write_snapshot, revision, image)
            self._journal.compact()
        except OSError as error:
            get_logger().error("snapshot_not_written", run=self._state.run, revision=revision, error=str(error))
        finally:
            self._writing = None
