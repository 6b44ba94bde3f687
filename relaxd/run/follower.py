"""Follows one run at the queue and at dcs, and writes what happens into the run directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict

from dcs.client import DcsControl
from relax.dcs.v1 import dcs_pb2
from relax.queue.v1 import queue_pb2
from relax_common.errors import DeadlineExceeded, Unavailable
from relax_common.process.telemetry import get_logger
from relax_common.rpc.channels import Backoff
from relax_common.versions import PolicyVersion
from relax_queue.client import AioQueueClient
from relaxd.disk import DiskWaits
from relaxd.run.drops import DropStreak
from relaxd.run.files import EventLog, JsonLines, flat_event, read_lines
from relaxd.run.ledger import Ledger
from relaxd.run.step_metrics import StepMetrics
from relaxd.run.summary import rollback_line

STREAM_SECONDS = 24 * 3600.0
T = TypeVar("T")


class RunFollower:
    """The constructor rebuilds everything from the files; the streams then resume where the files end."""

    def __init__(self, run_dir: Path, on_change: Callable[[], None], drops: DropStreak, waits: DiskWaits) -> None:
        self.drops = drops
        self._on_change = on_change
        self._waits = waits
        self.events = EventLog(run_dir / "events.jsonl")
        self._metrics = JsonLines(run_dir / "metrics.jsonl")
        self._last_line_revision = max((line["dcs_revision"] for line in read_lines(self._metrics.path)), default=0)
        self.ledger = Ledger()
        self._join = StepMetrics()
        self.last_line: dict[str, Any] = {}
        self.head: PolicyVersion | None = None
        self.rollback_revision = 0
        self.rollbacks: list[str] = []
        self._committed: PolicyVersion | None = None
        self.ended = asyncio.Event()
        for event in read_lines(run_dir / "events.jsonl"):
            self._fold(event)

    def _fold(self, event: dict[str, Any]) -> None:
        self.ledger.apply(event)
        if event["source"] == "queue":
            self._fold_queue(event)
        elif event["kind"] == "commit":
            self._committed = PolicyVersion(event["lineage"], event["version"])
        elif event["kind"] == "rollback":
            self._fold_rollback(event)

    def _fold_queue(self, event: dict[str, Any]) -> None:
        self._join.see_event(event)
        self.drops.see_event(event)
        if event["kind"] == "head":
            self.head = PolicyVersion(event["lineage"], event["version"])
            if event.get("rollback"):
                self.rollback_revision = event["dcs_revision"]
        elif event["kind"] == "run_state" and event["state"] == "ended":
            self.ended.set()

    def _fold_rollback(self, event: dict[str, Any]) -> None:
        now = PolicyVersion(int(event["lineage"]), int(event.get("head", 0)))
        before = self._committed or now
        self.rollbacks.append(rollback_line(before, now, event.get("reason", "")))
        self._committed = now

    def _add(self, event: dict[str, Any]) -> None:
        if self.events.append(event):
            self._fold(event)

    async def follow_queue(self, queue: AioQueueClient) -> None:
        async for message in _resumed(
            lambda: queue.watch_events(self.events.resume_after("queue"), STREAM_SECONDS), "queue"
        ):
            self._add(
                flat_event("queue", message.revision, message.time, message.kind, message.group, message.detail_json)
            )
            await self._write()
            if self.ended.is_set():
                return

    async def follow_dcs(self, dcs: DcsControl) -> None:
        # From the beginning: commit records are joined with queue events, and a restarted relaxd has no records.
        seen = [0]
        async for record in _resumed(lambda: dcs.log(seen[0]), "dcs"):
            seen[0] = record.revision
            self._add(_dcs_event(record))
            if record.HasField("commit"):
                self._join.see_commit(record.revision, record.commit)
            await self._write()

    async def _write(self) -> None:
        """Write to the files. A full disk stops the streams but not the run, whose state is at queue and dcs."""
        for line in self._join.take_ready():
            self.last_line = line
            if line["dcs_revision"] > self._last_line_revision:
                self._last_line_revision = line["dcs_revision"]
                self._metrics.append(line)
        await self.flush()
        self._on_change()

    async def flush(self) -> None:
        """Wait until everything seen is in the files."""
        await self._waits.hold("metrics.jsonl", self._flush_metrics)
        await self._waits.hold("events.jsonl", self._flush_events)

    async def _flush_metrics(self) -> None:
        self._metrics.flush()

    async def _flush_events(self) -> None:
        self.events.flush()

    def close(self) -> None:
        self.events.close()
        self._metrics.close()


async def _resumed(open_stream: Callable[[], AsyncIterator[T]], peer: str) -> AsyncIterator[T]:
    """A stream that is reopened whenever the peer goes away; the caller's cursor ensures that nothing is lost."""
    backoff = Backoff()
    while True:
        try:
            async for message in open_stream():
                backoff = Backoff()
                yield message
        except (Unavailable, DeadlineExceeded) as error:
            get_logger().warning("stream_broken", peer=peer, error=error.message)
        await asyncio.sleep(backoff.next_seconds())


def _dcs_event(record: dcs_pb2.LogRecord) -> dict[str, Any]:
    kind = str(record.WhichOneof("record"))
    event: dict[str, Any] = {
        "source": "dcs",
        "revision": record.revision,
        "time": record.time.ToNanoseconds() / 1e9,
        "kind": kind,
    }
    if kind == "commit":
        commit = record.commit
        event |= {
            "lineage": commit.version.lineage,
            "version": commit.version.number,
            "term": commit.term,
            "attempt": str(commit.attempt),
            "groups": list(commit.groups),
            "manifest_hash": f"{commit.manifest_hash:016x}",
            "metrics": dict(commit.metrics),
        }
        if commit.HasField("step"):
            event["step"] = commit.step
    else:
        event |= MessageToDict(getattr(record, kind), preserving_proto_field_name=True)
    return event


def run_metrics(line: dict[str, Any]) -> dict[str, float]:
    """Numbers of a metrics line for the Run message."""
    return {name: float(value) for name, value in line.items() if isinstance(value, (int, float))}


def describe_waits(status: queue_pb2.RunStatus) -> list[str]:
    """Who has waited at the queue for a second or more, and for what: one line per wait, longest first."""
    waits = sorted(status.waits, key=lambda wait: -wait.seconds)
    return [f"{wait.who} waits {wait.seconds:.1f} s for {wait.what}" for wait in waits if wait.seconds >= 1.0]
