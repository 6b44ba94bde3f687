"""Follows one run at the queue and at dcs, and writes what happens into the run directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.json_format import MessageToDict

from relax.controller.v1 import controller_pb2
from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc
from relax.queue.v1 import queue_pb2, queue_pb2_grpc
from relax_common.errors import Unavailable, from_rpc
from relax_common.process.logs import get_logger
from relax_common.rpc.channels import Backoff
from relax_common.versions import PolicyVersion
from relaxd.run.drop_streak import FailureStreak
from relaxd.run.files import EventLog, JsonLines, flat_event, read_lines
from relaxd.run.ledger import Ledger
from relaxd.run.step_metrics import StepMetrics

STREAM_SECONDS = 24 * 3600.0


class RunFollower:
    """Everything is rebuilt from the files at construction; the streams are then resumed where the files end."""

    def __init__(self, run: str, run_dir: Path, on_change: Callable[[], None], failures: FailureStreak) -> None:
        self._run = run
        self.failures = failures
        self._on_change = on_change
        self.events = EventLog(run_dir / "events.jsonl")
        self._metrics_path = run_dir / "metrics.jsonl"
        self._metrics = JsonLines(self._metrics_path)
        self._last_line_revision = max((line["dcs_revision"] for line in read_lines(self._metrics_path)), default=0)
        self.ledger = Ledger()
        self._join = StepMetrics()
        self.last_line: dict[str, Any] = {}
        self.head: PolicyVersion | None = None
        self.rollback_revision = 0
        self.ended = asyncio.Event()
        for event in read_lines(run_dir / "events.jsonl"):
            self._fold(event)

    def _fold(self, event: dict[str, Any]) -> None:
        self.ledger.apply(event)
        if event["source"] == "queue":
            self._join.see_event(event)
            self.failures.see_event(event)
            if event["kind"] == "head":
                self.head = PolicyVersion(event["lineage"], event["version"])
                if event.get("rollback"):
                    self.rollback_revision = event["dcs_revision"]
            elif event["kind"] == "run_state" and event["state"] == "ended":
                self.ended.set()

    def add(self, event: dict[str, Any]) -> None:
        """An event of relaxd itself, or of a stream."""
        if self.events.append(event):
            self._fold(event)

    async def follow_queue(self, stub: queue_pb2_grpc.QueueServiceStub) -> None:
        def open_stream() -> AsyncIterator[queue_pb2.WatchEventsResponse]:
            request = queue_pb2.WatchEventsRequest(run=self._run, after_revision=self.events.resume_after("queue"))
            stream: AsyncIterator[queue_pb2.WatchEventsResponse] = stub.WatchEvents(request, timeout=STREAM_SECONDS)
            return stream

        async for message in _resumed(open_stream, "queue"):
            self.add(
                flat_event("queue", message.revision, message.time, message.kind, message.group, message.detail_json)
            )
            self._changed()
            if self.ended.is_set():
                return

    async def follow_dcs(self, stub: dcs_pb2_grpc.DcsServiceStub) -> None:
        # From the beginning: commit records are joined with queue events, and a restarted relaxd has kept none.
        position = 0

        def open_stream() -> AsyncIterator[dcs_pb2.WatchLogResponse]:
            request = dcs_pb2.WatchLogRequest(run=self._run, after_revision=position)
            stream: AsyncIterator[dcs_pb2.WatchLogResponse] = stub.WatchLog(request, timeout=STREAM_SECONDS)
            return stream

        async for message in _resumed(open_stream, "dcs"):
            record = message.record
            position = record.revision
            self.add(_dcs_event(record))
            if record.HasField("commit"):
                self._join.see_commit(record.revision, record.commit)
            self._changed()

    def _changed(self) -> None:
        for line in self._join.take_ready():
            self.last_line = line
            if line["dcs_revision"] > self._last_line_revision:
                self._last_line_revision = line["dcs_revision"]
                self._metrics.append(line)
                self._metrics.flush()
        self.events.flush()
        self._on_change()

    def close(self) -> None:
        self.events.close()
        self._metrics.close()


async def _resumed(open_stream: Callable[[], AsyncIterator[Any]], peer: str) -> AsyncIterator[Any]:
    """A stream that is opened again whenever the peer goes away; the caller's cursor makes that seamless."""
    backoff = Backoff()
    while True:
        try:
            async for message in open_stream():
                backoff = Backoff()
                yield message
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc(rpc_error)
            if not isinstance(error, Unavailable) and error.code != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise error from rpc_error
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


def describe_waits(status: queue_pb2.RunStatus, daemons: list[controller_pb2.Daemon]) -> list[str]:
    """Who waits for what, one line each, longest first."""
    waits = sorted(status.waits, key=lambda wait: -wait.seconds)
    lines = [f"{wait.who} waits {wait.seconds:.1f} s for {wait.what}" for wait in waits if wait.seconds >= 1.0]
    lines += [f"{d.identity.instance} waits for {d.waits_for}" for d in daemons if d.alive and d.waits_for]
    return lines
