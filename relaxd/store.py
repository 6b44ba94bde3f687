"""relaxd's durable state: SQLite in WAL mode, writes of concurrent callers joined in one transaction."""

from __future__ import annotations

import asyncio
import functools
import json
import queue
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from relax.controller.v1 import controller_pb2
from relax_common.errors import Precondition, RelaxError
from relax_common.process.telemetry import get_logger
from relaxd.disk import DiskWaits, refused

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS runs (run TEXT PRIMARY KEY, request_id TEXT NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS daemons (
  instance TEXT NOT NULL, rank INTEGER NOT NULL, body BLOB NOT NULL, PRIMARY KEY (instance, rank));
CREATE TABLE IF NOT EXISTS terms (instance TEXT PRIMARY KEY, term INTEGER NOT NULL, incarnation TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS processes (
  instance TEXT NOT NULL, rank INTEGER NOT NULL, pid INTEGER NOT NULL, incarnation TEXT NOT NULL,
  port INTEGER NOT NULL, PRIMARY KEY (instance, rank));
CREATE TABLE IF NOT EXISTS events (
  revision INTEGER PRIMARY KEY, time_ns INTEGER NOT NULL, kind TEXT NOT NULL, run TEXT NOT NULL, detail TEXT NOT NULL);
"""

Write = Callable[[sqlite3.Connection], None]


@dataclass(frozen=True)
class ProcessRow:
    """A process that relaxd started, so that a restarted relaxd finds it again."""

    instance: str
    rank: int
    pid: int
    incarnation: str
    port: int


class Bell:
    """Wakes all tasks that wait at the moment it rings. Check the condition before you wait: a past ring is not
    remembered."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self) -> None:
        await self._event.wait()


@dataclass(frozen=True)
class NewEvent:
    """An event that gets its revision when it is stored."""

    kind: str
    run: str
    detail_json: str
    time_ns: int


def new_event(kind: str, run: str, detail: Mapping[str, object]) -> NewEvent:
    return NewEvent(kind, run, json.dumps(detail), time.time_ns())


@dataclass(frozen=True)
class _Job:
    """A caller's writes, and the future that tells it when they are on disk."""

    writes: tuple[Write, ...]
    event: NewEvent | None
    done: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop


class Store:
    """Reads happen at start-up only; the caller keeps the state in memory, and changes it after the disk.

    A write that fails has changed nothing, neither on disk nor here.
    """

    def __init__(self, folder: Path, waits: DiskWaits) -> None:
        self._folder = folder
        self._path = folder / "relaxd.sqlite"
        self._waits = waits
        try:
            # Opened here and used by the writing thread alone from then on.
            self._connection = self._connect()
            self._load(self._connection)
        except sqlite3.Error as error:
            raise refused(error, folder, "its own term") from error
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._later: asyncio.Queue[tuple[str, tuple[Write, ...], NewEvent | None]] = asyncio.Queue()
        self._later_task: asyncio.Task[None] | None = None
        self._appended = Bell()
        self._thread = threading.Thread(target=self._write_loop, name="relaxd-store", daemon=True)
        self._thread.start()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    def _load(self, connection: sqlite3.Connection) -> None:
        connection.executescript(_SCHEMA)
        connection.execute("INSERT INTO meta VALUES ('term', 1) ON CONFLICT(key) DO UPDATE SET value = value + 1")
        connection.commit()
        # relaxd's own term is on disk before its listener opens.
        self.own_term = int(connection.execute("SELECT value FROM meta WHERE key = 'term'").fetchone()[0])
        self.runs = [
            (request_id, controller_pb2.Run.FromString(body))
            for request_id, body in connection.execute("SELECT request_id, body FROM runs ORDER BY rowid")
        ]
        self.daemons = [
            controller_pb2.Daemon.FromString(body) for (body,) in connection.execute("SELECT body FROM daemons")
        ]
        self.terms: dict[str, tuple[int, str]] = {
            instance: (term, incarnation) for instance, term, incarnation in connection.execute("SELECT * FROM terms")
        }
        self.processes = [ProcessRow(*row) for row in connection.execute("SELECT * FROM processes")]
        self.events = [
            _event(revision, NewEvent(kind, run, detail, time_ns))
            for revision, time_ns, kind, run, detail in connection.execute("SELECT * FROM events ORDER BY revision")
        ]
        """All events of this controller, by revision."""

    async def write(self, *writes: Write, event: NewEvent | None = None) -> None:
        """Returns once the writes and the event are on disk, in one transaction.

        Raises Unavailable where the disk has no room: nothing has changed, and the caller may repeat.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._queue.put(_Job(writes, event, done, loop))
        try:
            await done
        except sqlite3.Error as error:
            raise refused(error, self._folder, "the state of relaxd") from error

    def write_later(self, what: str, *writes: Write, event: NewEvent | None = None) -> None:
        """Write in the background, in order, what no answer waits for; while the disk is full, the wait is reported."""
        self._later.put_nowait((what, writes, event))
        if self._later_task is None or self._later_task.done():
            self._later_task = asyncio.get_running_loop().create_task(self._write_those_held())

    async def _write_those_held(self) -> None:
        while not self._later.empty():
            what, writes, event = self._later.get_nowait()
            try:
                await self._waits.hold(what, functools.partial(self.write, *writes, event=event))
            except RelaxError as error:
                get_logger().error("write_failed", what=what, error=error.message)

    def _write_loop(self) -> None:
        while (job := self._queue.get()) is not None:
            batch = [job]
            while not self._queue.empty():
                more = self._queue.get()
                if more is None:
                    self._queue.put(None)
                    break
                batch.append(more)
            revisions = [0] * len(batch)
            failure: sqlite3.Error | None = None
            try:
                with self._connection:
                    revisions = [_apply(self._connection, job) for job in batch]
            except sqlite3.Error as error:
                failure = error
            for job, revision in zip(batch, revisions, strict=True):
                job.loop.call_soon_threadsafe(self._settle, job, revision, failure)
        self._connection.close()

    def _settle(self, job: _Job, revision: int, failure: sqlite3.Error | None) -> None:
        """Memory follows the disk, even if the caller has gone away."""
        if failure is None and job.event is not None:
            self.events.append(_event(revision, job.event))
            self._appended.ring()
        if job.done.done():
            return
        if failure is None:
            job.done.set_result(None)
        else:
            job.done.set_exception(failure)

    async def watch(self, after_revision: int) -> AsyncIterator[controller_pb2.WatchEventsResponse]:
        """Yields events after a revision, then new ones. Raises Precondition for a revision that does not exist."""
        position = after_revision
        if position > len(self.events):
            raise Precondition(
                f"revision {position} does not exist: the newest event of this controller is {len(self.events)}"
            )
        while True:
            while position < len(self.events):
                yield self.events[position]
                position += 1
            await self._appended.wait()

    async def close(self) -> None:
        if self._later_task is not None:
            self._later_task.cancel()
            await asyncio.gather(self._later_task, return_exceptions=True)
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join, 10)


def _apply(connection: sqlite3.Connection, job: _Job) -> int:
    for write in job.writes:
        write(connection)
    event = job.event
    if event is None:
        return 0
    # Numbered when it is stored: an event that fails to be stored takes no number and leaves no gap.
    (last,) = connection.execute("SELECT COALESCE(MAX(revision), 0) FROM events").fetchone()
    values = (int(last) + 1, event.time_ns, event.kind, event.run, event.detail_json)
    _run(connection, "INSERT INTO events VALUES (?, ?, ?, ?, ?)", *values)
    return int(last) + 1


def put_run(run: controller_pb2.Run, request_id: str) -> Write:
    body = run.SerializeToString()
    return lambda c: _run(
        c,
        "INSERT INTO runs VALUES (?, ?, ?) ON CONFLICT(run) DO UPDATE SET body = excluded.body",
        run.run,
        request_id,
        body,
    )


def put_daemon(daemon: controller_pb2.Daemon) -> Write:
    key, body = (daemon.identity.instance, daemon.rank), daemon.SerializeToString()
    return lambda c: _run(c, "INSERT OR REPLACE INTO daemons VALUES (?, ?, ?)", *key, body)


def put_term(instance: str, term: int, incarnation: str) -> Write:
    return lambda c: _run(c, "INSERT OR REPLACE INTO terms VALUES (?, ?, ?)", instance, term, incarnation)


def put_process(row: ProcessRow) -> Write:
    return lambda c: _run(
        c,
        "INSERT OR REPLACE INTO processes VALUES (?, ?, ?, ?, ?)",
        row.instance,
        row.rank,
        row.pid,
        row.incarnation,
        row.port,
    )


def _run(connection: sqlite3.Connection, sql: str, *values: object) -> None:
    connection.execute(sql, values)


def _event(revision: int, new: NewEvent) -> controller_pb2.WatchEventsResponse:
    event = controller_pb2.WatchEventsResponse(
        revision=revision, kind=new.kind, run=new.run, detail_json=new.detail_json
    )
    event.time.FromNanoseconds(new.time_ns)
    return event
