"""The durable log of one run in segments, its snapshots, and reading its events back by revision.

    log-00000000000000000001        transactions from revision 1
    log-00000000000000004096        the active segment: transactions from revision 4096
    snapshot-00000000000000004095   the state after revision 4095: what a restart reads instead of older segments

A segment is closed when it has outgrown the newest snapshot; then a new snapshot of the state is written. A process may
die at any arrow of this sequence:

    fsync old segment -> new segment -> snapshot.tmp -> fsync -> rename -> remove what no restart needs

Closed segments older than the newest snapshot are kept up to a size, for watchers that have not seen their events.
"""

import asyncio
import bisect
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from relax_common.errors import DataLoss, EventsCompacted
from relax_common.failpoints import failpoint
from relax_common.process.telemetry import get_logger
from relax_common.storage.framed_log import FramedLog, durable_folder, fsync_folder
from relax_queue.rules import events as ev
from relax_queue.rules.state import RunState
from relax_queue.storage import snapshots
from relax_queue.storage.disk import DiskSizes
from relax_queue.storage.segments import (
    Segment,
    find_segments,
    find_snapshots,
    frames_of,
    log_path,
    read_frame,
    snapshot_path,
)

RECENT_TRANSACTIONS = 1024
ROUNDS_BEFORE_FLUSH = 2
"""In the first round waiting calls check again; in the second those that may go on do so; then the log is fsynced."""
AHEAD_BYTES = 1 << 20
"""Zeros that a segment keeps ahead of its transactions, at most: an fsync over them costs a fraction of one that grows
the file."""


QUICK_SECONDS = 0.001


class Pace:
    """Is the disk so fast that handing an fsync to a thread and waiting for the result would take longer?

    Then the fsync is made on the event loop. One slow fsync ends that, until several were fast again.
    """

    def __init__(self) -> None:
        self._mean_seconds = 2 * QUICK_SECONDS

    def note(self, seconds: float) -> None:
        self._mean_seconds += 0.2 * (seconds - self._mean_seconds)

    @property
    def is_quick(self) -> bool:
        return self._mean_seconds < QUICK_SECONDS


class Journal:
    """Appends transactions; watchers see only events that are on disk. Revisions number the events from 1."""

    def __init__(
        self, folder: Path, before_flush: Callable[[], None] = lambda: None, sizes: DiskSizes | None = None
    ) -> None:
        durable_folder(folder)
        self.folder = folder
        self._before_flush = before_flush
        self._sizes = sizes or DiskSizes()
        self._ahead_bytes = min(AHEAD_BYTES, self._sizes.segment_bytes)
        self._segments: list[Segment] = []
        self._log: FramedLog | None = None
        self._retired: list[FramedLog] = []
        self._recent: dict[int, ev.Transaction] = {}
        self._flushing = False
        self._waiting: list[asyncio.Future[None]] = []
        self._pace = Pace()
        self.revision = 0
        self.durable_revision = 0
        self.snapshot_bytes = 0

    # Reading back at the start

    def recover(self) -> tuple[RunState | None, Iterator[ev.Transaction]]:
        """The newest snapshot's state, if there is one, and the transactions after it; fold one over the other.

        A torn tail of the last segment is cut off. Raises DataLoss where a record cannot be read or some are missing.
        """
        for leftover in self.folder.glob("*.tmp"):
            leftover.unlink()
        state, self.revision = self._newest_snapshot()
        return state, self._replay(self.revision)

    def _newest_snapshot(self) -> tuple[RunState | None, int]:
        for revision, path in reversed(find_snapshots(self.folder)):
            try:
                state = snapshots.load(frame for _, frame in frames_of(path))
                self.snapshot_bytes = path.stat().st_size
                return state, revision
            except (DataLoss, msgspec.DecodeError) as error:
                # The snapshot before this one, with the longer log after it, gives the same state.
                get_logger().error("snapshot_unreadable", path=str(path), error=str(error).splitlines()[0])
        return None, 0

    def _replay(self, revision: int) -> Iterator[ev.Transaction]:
        self._segments = find_segments(self.folder)
        later = [s for s in self._segments if s.first_revision > revision]
        if (revision or self._segments) and (not later or later[0].first_revision != revision + 1):
            raise DataLoss(f"{log_path(self.folder, revision + 1)} is missing; restore it from a copy")
        for segment in later:
            if segment.first_revision != self.revision + 1:
                raise DataLoss(
                    f"{segment.path}: it begins with revision {segment.first_revision}, but the log before it ends "
                    f"with {self.revision}; restore the segment in between from a copy"
                )
            yield from self._read_segment(segment)
        self._open_last()
        self.durable_revision = self.revision

    def _read_segment(self, segment: Segment) -> Iterator[ev.Transaction]:
        log, position = FramedLog(segment.path, self._ahead_bytes), 0
        for frame in log.replay():
            transaction = _load(frame, segment.path, position)
            segment.note(self.revision + 1, position)
            self.revision += ev.width(transaction)
            position += len(frame) + log.HEAD_BYTES
            yield transaction
        if segment is self._segments[-1]:
            self._log = log
        else:
            log.close()

    def _open_last(self) -> None:
        if self._log is None:
            self._begin_segment()

    def _begin_segment(self) -> None:
        segment = Segment(self.revision + 1, log_path(self.folder, self.revision + 1))
        self._log = FramedLog(segment.path, self._ahead_bytes)
        self._segments = [s for s in self._segments if s.path != segment.path] + [segment]

    # Appending

    def append(self, events: list[ev.Event]) -> None:
        """Hand a transaction to the operating system; it is not durable before `sync`. On OSError the log is
        unchanged."""
        assert self._log is not None
        transaction = ev.Transaction(time.time(), tuple(events))
        position = self._log.end
        self._log.append(ev.dump(transaction))
        self._segments[-1].note(self.revision + 1, position)
        self._recent[self.revision + 1] = transaction
        if len(self._recent) > RECENT_TRANSACTIONS:
            del self._recent[next(iter(self._recent))]
        self.revision += ev.width(transaction)
        failpoint("queue.after_append")

    async def sync(self) -> bool:
        """Wait until everything appended so far is durable; returns whether this call made more durable than before."""
        wanted = self.revision
        if wanted <= self.durable_revision:
            return False
        while self.durable_revision < wanted:
            self.flush_soon()
            # A future of its own: one cancelled caller must not cancel the fsync that others wait for.
            durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(durable)
            await durable
        return True

    def flush_soon(self) -> None:
        """Make durable what will have been appended a few rounds of the event loop from now.

        Until then the readers that were woken have their answers ready: these travel while the disk writes.
        """
        if not self._flushing and self.revision > self.durable_revision:
            self._flushing = True
            self._flush_after(ROUNDS_BEFORE_FLUSH)

    def _flush_after(self, rounds: int) -> None:
        if rounds:
            asyncio.get_running_loop().call_soon(self._flush_after, rounds - 1)
        else:
            self._flush()

    def _flush(self) -> None:
        covered, log = self.revision, self._log
        assert log is not None
        failpoint("queue.before_fsync")
        if self._pace.is_quick:
            try:
                self._flush_now(log)
            except OSError as error:
                self._flushed(covered, error)
            else:
                self._flushed(covered, None)
            return
        work = asyncio.get_running_loop().run_in_executor(None, self._flush_now, log)
        work.add_done_callback(lambda done: None if done.cancelled() else self._flushed(covered, done.exception()))

    def _flushed(self, covered: int, error: BaseException | None) -> None:
        self._flushing = False
        if error is None:
            self.durable_revision = max(self.durable_revision, covered)
        waiting, self._waiting = self._waiting, []
        # The newest first: a reader calls after the put that wakes it, and its rank is waiting for the answer.
        for durable in reversed(waiting):
            if durable.done():
                continue
            if error is None:
                durable.set_result(None)
            else:
                durable.set_exception(error)
        for old in self._retired:
            old.close()
        self._retired.clear()

    def _flush_now(self, log: FramedLog) -> None:
        begun = time.perf_counter()
        # Payload first: a record on disk without its payload would name rows that do not exist.
        self._before_flush()
        failpoint("queue.between_fsyncs")
        log.flush()
        self._pace.note(time.perf_counter() - begun)
        failpoint("queue.after_fsync")

    @property
    def is_durable(self) -> bool:
        return self.durable_revision >= self.revision

    @property
    def log_bytes(self) -> int:
        """Bytes of the active segment."""
        return 0 if self._log is None else self._log.end

    # Snapshots

    @property
    def wants_snapshot(self) -> bool:
        return self.log_bytes >= max(self._sizes.segment_bytes, self.snapshot_bytes)

    def rotate(self) -> int:
        """Close the active segment durably and begin the next; returns the revision of a snapshot taken now."""
        assert self._log is not None
        failpoint("queue.before_rotate")
        self._log.trim()
        # Before anything is written to the next segment: a restart refuses a log with a hole.
        self._flush_now(self._log)
        self.durable_revision = self.revision
        old = self._log
        self._begin_segment()
        self._retired.append(old)
        failpoint("queue.after_rotate")
        return self.revision

    def write_snapshot(self, revision: int, image: snapshots.Image) -> None:
        """Write a snapshot; it is durable when this returns. It is slow: call it in a thread."""
        path = snapshot_path(self.folder, revision)
        temporary = path.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)
        file = FramedLog(temporary)
        try:
            for frame in snapshots.dump(image):
                file.append(frame)
            failpoint("queue.snapshot_before_fsync")
        finally:
            file.close()
        failpoint("queue.snapshot_before_rename")
        temporary.replace(path)
        fsync_folder(self.folder)
        self.snapshot_bytes = path.stat().st_size
        failpoint("queue.snapshot_before_compaction")

    def compact(self) -> None:
        """Remove what neither a restart nor a watcher that keeps up needs: old segments, and all but two snapshots."""
        known = find_snapshots(self.folder)
        for _, path in known[:-2]:
            path.unlink()
        if len(known) < 2:
            return
        failpoint("queue.compaction_midway")
        needed_from = known[-2][0] + 1
        history = [s for s in self._segments if s.first_revision < needed_from]
        kept_bytes = 0
        for segment in reversed(history):
            kept_bytes += segment.path.stat().st_size
            if kept_bytes > self._sizes.history_bytes:
                segment.path.unlink()
                self._segments.remove(segment)
        fsync_folder(self.folder)

    def reread(self) -> tuple[RunState | None, Iterator[ev.Transaction]]:
        """Like `recover`, for everything appended so far; called after a transaction that could not be appended."""
        state, revision = self._newest_snapshot()
        later = [segment for segment in self._segments if segment.first_revision > revision]
        return state, (
            _load(read_frame(segment.path, position), segment.path, position)
            for segment in later
            for position in segment.positions
        )

    # Watchers

    def has_after(self, revision: int) -> bool:
        """Are there durable events after a revision?"""
        return revision < self.durable_revision

    def transaction_after(self, revision: int) -> tuple[int, ev.Transaction]:
        """The transaction that holds the event after a revision, and its first revision; ask `has_after` first.

        It comes from memory if the watcher keeps up. Raises EventsCompacted if the events are no longer kept.
        """
        revision += 1
        if revision < self._segments[0].first_revision:
            raise EventsCompacted(
                f"events before revision {self._segments[0].first_revision} have been compacted away; the watcher has "
                f"seen {revision - 1}",
                details={"first_revision": str(self._segments[0].first_revision)},
            )
        at = bisect.bisect_right(self._segments, revision, key=lambda s: s.first_revision) - 1
        segment = self._segments[at]
        if not segment.positions:
            self._index(segment)
        i = bisect.bisect_right(segment.first_revisions, revision) - 1
        first, position = segment.first_revisions[i], segment.positions[i]
        recent = self._recent.get(first)
        return first, recent or _load(read_frame(segment.path, position), segment.path, position)

    def _index(self, segment: Segment) -> None:
        """Index a segment that no restart has read, when a watcher asks for its events."""
        revision = segment.first_revision
        for position, frame in frames_of(segment.path):
            segment.note(revision, position)
            revision += ev.width(_load(frame, segment.path, position))

    def close(self) -> None:
        for log in (*self._retired, *([self._log] if self._log else [])):
            log.close()


def _load(frame: bytes, path: Path, position: int) -> ev.Transaction:
    try:
        return ev.load(frame)
    except msgspec.DecodeError as error:
        raise DataLoss(
            f"{path}: the record at byte {position} is not a transaction of this release: {error}"
        ) from error
