"""The durable log of one run, and reading its events back by revision."""

import bisect
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import DataLoss
from relax_common.failpoints import failpoint
from relax_common.framed_log import FramedLog
from relax_queue import events as ev
from relax_queue.public_events import show, width

RECENT_TRANSACTIONS = 1024


class Journal:
    """Appends transactions; what is shown to watchers is on disk. Revisions number the events from 1."""

    def __init__(self, path: Path) -> None:
        self._log = FramedLog(path)
        self._first_revisions: list[int] = []
        self._positions: list[int] = []
        self._durable_end = 0
        self._recent: dict[int, ev.Transaction] = {}
        self.revision = 0

    def replay(self) -> Iterator[ev.Transaction]:
        """All whole transactions; a torn tail is cut off. Raises DataLoss where one cannot be read."""
        position = 0
        for frame in self._log.replay():
            try:
                transaction = ev.load(frame)
            except ValidationError as error:
                raise DataLoss(
                    f"{self._log.path}: the record at byte {position} is no transaction of this release: "
                    f"{error.errors()[0]['msg']}"
                ) from error
            self._note(transaction, position)
            position += len(frame) + self._log.HEAD_BYTES
            yield transaction
        self._durable_end = self._log.end

    def _note(self, transaction: ev.Transaction, position: int) -> None:
        self._first_revisions.append(self.revision + 1)
        self._positions.append(position)
        self.revision += width(transaction)

    def append(self, events: list[ev.Event]) -> None:
        """Hand a transaction to the operating system; not durable before `sync`."""
        transaction = ev.Transaction(time.time(), tuple(events))
        position = self._log.end
        self._log.append(ev.dump(transaction))
        self._recent[len(self._positions)] = transaction
        self._recent.pop(len(self._positions) - RECENT_TRANSACTIONS, None)
        self._note(transaction, position)

    async def sync(self) -> bool:
        """Wait until everything appended so far is durable; whether this call made more durable than was before."""
        end = self._log.end
        if end <= self._durable_end:
            return False
        failpoint("queue.before_fsync")
        await self._log.sync()
        advanced = end > self._durable_end
        self._durable_end = max(self._durable_end, end)
        return advanced

    @property
    def is_durable(self) -> bool:
        return self._durable_end >= self._log.end

    def has_after(self, revision: int) -> bool:
        """Are there durable events behind a revision?"""
        at = bisect.bisect_right(self._first_revisions, revision + 1) - 1
        return revision < self.revision and self._positions[max(0, at)] < self._durable_end

    def messages_after(self, revision: int) -> tuple[list[pb.WatchEventsResponse], int]:
        """Some durable events behind a revision in order, and the revision up to which all have been looked at.

        Without messages every durable event has been looked at: those behind `revision` are not for others to see.
        """
        at = max(0, bisect.bisect_right(self._first_revisions, revision + 1) - 1)
        while at < len(self._positions) and self._positions[at] < self._durable_end:
            transaction = self._transaction(at)
            first = self._first_revisions[at]
            last = first + width(transaction) - 1
            messages = [m for m in show(transaction, first) if m.revision > revision]
            revision = max(revision, last)
            if messages:
                return messages, last
            at += 1
        return [], revision

    def _transaction(self, at: int) -> ev.Transaction:
        """From memory where a watcher keeps up, else from the file."""
        recent = self._recent.get(at)
        return recent or ev.load(next(self._log.read(self._positions[at], self._durable_end)))

    def close(self) -> None:
        self._log.close()
