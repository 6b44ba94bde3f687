"""relaxd's durable state: SQLite in WAL mode, writes of concurrent callers joined in one transaction."""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from relax.controller.v1 import controller_pb2

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


class Store:
    """Reads happen at start-up only; the caller keeps the state in memory and writes through."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "relaxd.sqlite"
        connection = self._connect()
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
        self.events: list[controller_pb2.WatchEventsResponse] = []
        for revision, time_ns, kind, run, detail in connection.execute("SELECT * FROM events ORDER BY revision"):
            self.events.append(_event(revision, time_ns, kind, run, detail))
        connection.close()
        self._queue: queue.SimpleQueue[tuple[Write, asyncio.Future[None], asyncio.AbstractEventLoop] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._write_loop, name="relaxd-store", daemon=True)
        self._thread.start()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    async def write(self, *writes: Write) -> None:
        """Returns once the writes are on disk; they share a transaction, perhaps with those of other callers."""

        def all_of(connection: sqlite3.Connection) -> None:
            for write in writes:
                write(connection)

        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._queue.put((all_of, done, loop))
        await done

    def _write_loop(self) -> None:
        connection = self._connect()
        while (item := self._queue.get()) is not None:
            batch = [item]
            while not self._queue.empty():
                more = self._queue.get()
                if more is None:
                    self._queue.put(None)
                    break
                batch.append(more)
            error: sqlite3.Error | None = None
            try:
                with connection:
                    for write, _, _ in batch:
                        write(connection)
            except sqlite3.Error as caught:
                error = caught
            for _, done, loop in batch:
                loop.call_soon_threadsafe(_settle, done, error)
        connection.close()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=10)

    def add_event(self, kind: str, run: str, detail_json: str) -> tuple[controller_pb2.WatchEventsResponse, Write]:
        """The next event and the write that makes it durable."""
        revision, time_ns = len(self.events) + 1, time.time_ns()
        event = _event(revision, time_ns, kind, run, detail_json)
        self.events.append(event)
        return event, lambda c: _run(
            c, "INSERT INTO events VALUES (?, ?, ?, ?, ?)", revision, time_ns, kind, run, detail_json
        )


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


def _event(revision: int, time_ns: int, kind: str, run: str, detail_json: str) -> controller_pb2.WatchEventsResponse:
    event = controller_pb2.WatchEventsResponse(revision=revision, kind=kind, run=run, detail_json=detail_json)
    event.time.FromNanoseconds(time_ns)
    return event


def _settle(done: asyncio.Future[None], error: sqlite3.Error | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
