"""`relaxctl queue`: shows what the sample bus holds, one of its groups, and its events."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from relax.common.v1 import common_pb2
from relax.controller.v1 import controller_pb2
from relax.queue.v1 import queue_pb2, queue_pb2_grpc
from relax_common.errors import EventsCompacted, NotFound, from_rpc
from relax_common.rpc.channels import call_with_retry, sync_channel
from relaxd.ctl.output import Format, print_json
from relaxd.ctl.views import CALL_SECONDS, connect

WATCH_SECONDS = 24 * 3600.0
GROUP_STATES = ("offered", "admitted", "pending", "leased", "ready", "planned", "trained", "returned", "rolled_back")


def queue_address(controller: str) -> str:
    """The address of the queue that relaxd knows."""
    stub = connect(controller)
    response = call_with_retry(
        lambda s: stub.ListDaemons(controller_pb2.ListDaemonsRequest(), timeout=s),
        what=f"relaxd at {controller}",
        deadline_seconds=CALL_SECONDS,
    )
    for daemon in response.daemons:
        if daemon.identity.role == common_pb2.ROLE_QUEUE and daemon.alive:
            return str(daemon.address)
    raise NotFound(f"relaxd at {controller} knows no live queue; name one with --queue host:port")


class QueueView:
    """Queries one queue."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stub = queue_pb2_grpc.QueueServiceStub(sync_channel(address))
        self._console = Console()

    def _runs(self, run: str) -> list[queue_pb2.RunStatus]:
        response = call_with_retry(
            lambda s: self._stub.GetStatus(queue_pb2.GetStatusRequest(run=run), timeout=s),
            what=f"the queue at {self._address}",
            deadline_seconds=CALL_SECONDS,
        )
        return list(response.runs)

    def status(self, run: str, output: Format) -> int:
        """Counts, bytes, leases, waits and kept steps of one run or all."""
        found = [(status, self._partitions(status.run)) for status in self._runs(run)]
        if output == "json":
            print_json([_status(status, partitions) for status, partitions in found])
            return 0
        for status, partitions in found:
            head = f"version {_version(status.head)}" if status.HasField("head") else "no version yet"
            self._console.print(
                f"[bold]{status.run}[/bold] {_state(status)}, {head}, durability {status.durability}, dcs record "
                f"{status.applied_revision}",
                highlight=False,
            )
            for table in (_groups(status), _bytes(status), _servers(status), _kept_steps(partitions)):
                if table.row_count:
                    self._console.print(table)
            for wait in sorted(status.waits, key=lambda w: -w.seconds):
                self._console.print(f"  {wait.who} waits {wait.seconds:.1f} s for {wait.what}", highlight=False)
        return 0

    def _partitions(self, run: str) -> list[queue_pb2.Partition]:
        response = call_with_retry(
            lambda s: self._stub.ListPartitions(queue_pb2.ListPartitionsRequest(run=run), timeout=s),
            what=f"the queue at {self._address}",
            deadline_seconds=CALL_SECONDS,
        )
        return list(response.partitions)

    def inspect(self, run: str, group: str, output: Format) -> int:
        """State, rows and fields of one group."""
        found = call_with_retry(
            lambda s: self._stub.Inspect(queue_pb2.InspectRequest(run=run, group=group), timeout=s),
            what=f"the queue at {self._address}",
            deadline_seconds=CALL_SECONDS,
        )
        if output == "json":
            print_json(_group(found, group))
            return 0
        table = Table(title=f"group {group}", show_header=False)
        table.add_row("state", found.state + (f" ({found.reason})" if found.reason else ""))
        table.add_row("attempts", str(found.attempts))
        if found.HasField("deadline_version"):
            table.add_row("trained at the latest in step", str(found.deadline_version))
        table.add_row("rows (sample.segment)", ", ".join(f"{r.sample}.{r.segment}" for r in found.rows) or "none")
        table.add_row("fields", ", ".join(found.fields) or "none")
        table.add_row("prompt", found.group.prompt_json or "forgotten: its end is final")
        if found.group.HasField("label"):
            table.add_row("label", found.group.label)
        self._console.print(table)
        return 0

    def watch(self, run: str, after_revision: int, output: Format) -> int:
        """Events as they happen, until the run has ended; as JSON, one object per line."""
        for event in self._events(run, after_revision):
            line = _event_json(event) if output == "json" else _event_line(event)
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        return 0

    def _events(self, run: str, after_revision: int) -> Iterator[queue_pb2.WatchEventsResponse]:
        request = queue_pb2.WatchEventsRequest(run=run, after_revision=after_revision)
        try:
            yield from self._stub.WatchEvents(request, timeout=WATCH_SECONDS)
        except grpc.RpcError as rpc_error:
            error = from_rpc(rpc_error)
            if not isinstance(error, EventsCompacted):
                raise error from rpc_error
            first = int(error.details["first_revision"])
            print(f"events before revision {first} are not kept any more", file=sys.stderr)
            yield from self._events(run, first - 1)


def _state(status: queue_pb2.RunStatus) -> str:
    return queue_pb2.RunState.Name(status.state).removeprefix("RUN_STATE_").lower()


def _version(version: common_pb2.PolicyVersion) -> str:
    return f"{version.lineage}.{version.number}"


def _status(status: queue_pb2.RunStatus, partitions: list[queue_pb2.Partition]) -> dict[str, Any]:
    counts = status.counts
    return {
        "run": status.run,
        "state": _state(status),
        "version": _version(status.head) if status.HasField("head") else None,
        "durability": status.durability,
        "dcs_revision": status.applied_revision,
        "groups": {state: getattr(counts, state) for state in GROUP_STATES},
        "dropped": dict(counts.dropped),
        "leases_lost": counts.leases_lost,
        "oldest_lease_seconds": status.oldest_lease_seconds,
        "bytes": {
            "held": status.bytes_held,
            "reserved": status.bytes_reserved,
            "budget": status.bytes_budget,
            "log": status.log_bytes,
            "snapshot": status.snapshot_bytes,
            "payload_files": status.payload_disk_bytes,
        },
        "confirmed": {server: _version(version) for server, version in status.confirmed.items()},
        "partitions": [
            {
                "partition": p.name,
                "generation": p.plan.generation,
                "chunks": p.chunks,
                "rows": p.rows,
                "bytes": p.bytes,
                "closed": p.closed,
                "committed": p.committed,
            }
            for p in partitions
        ],
        "waits": [{"who": wait.who, "what": wait.what, "seconds": wait.seconds} for wait in status.waits],
    }


def _group(found: queue_pb2.InspectResponse, group: str) -> dict[str, Any]:
    """`prompt` is None once the group's end is final: the queue has then forgotten it."""
    return {
        "group": group,
        "state": found.state,
        "reason": found.reason,
        "attempts": found.attempts,
        "deadline_version": found.deadline_version if found.HasField("deadline_version") else None,
        "rows": [{"sample": row.sample, "segment": row.segment} for row in found.rows],
        "fields": list(found.fields),
        "prompt": json.loads(found.group.prompt_json) if found.group.prompt_json else None,
        "label": found.group.label if found.group.HasField("label") else None,
    }


def _event_json(event: queue_pb2.WatchEventsResponse) -> str:
    content = {
        "revision": event.revision,
        "time": event.time.ToNanoseconds() / 1e9,
        "kind": event.kind,
        "group": event.group,
        "detail": json.loads(event.detail_json or "{}"),
    }
    return json.dumps(content, sort_keys=True)


def _event_line(event: queue_pb2.WatchEventsResponse) -> str:
    detail = " ".join(f"{name}={value}" for name, value in json.loads(event.detail_json or "{}").items())
    time = event.time.ToDatetime().isoformat(sep=" ", timespec="milliseconds")
    return f"{event.revision:>8} {time} {event.kind:<12} {event.group} {detail}".rstrip()


def _kept_steps(partitions: list[queue_pb2.Partition]) -> Table:
    table = Table("partition", "generation", "chunks", "rows", "bytes", "state")
    for p in partitions:
        state = "committed, kept for a replay" if p.committed else "closed" if p.closed else "open"
        table.add_row(p.name, str(p.plan.generation), str(p.chunks), str(p.rows), f"{p.bytes:,}", state)
    return table


def _groups(status: queue_pb2.RunStatus) -> Table:
    table = Table("groups", "count")
    for state in GROUP_STATES:
        count = getattr(status.counts, state)
        if count or state in ("pending", "leased", "ready", "planned", "trained"):
            table.add_row(state, str(count))
    for reason, count in sorted(status.counts.dropped.items()):
        table.add_row(f"dropped: {reason}", str(count))
    if status.counts.leases_lost:
        table.add_row("leases lost", str(status.counts.leases_lost))
    return table


def _bytes(status: queue_pb2.RunStatus) -> Table:
    table = Table("bytes", "of payload and log")
    table.add_row("held", f"{status.bytes_held:,}")
    table.add_row("reserved by leases and rows", f"{status.bytes_reserved:,}")
    table.add_row("budget", f"{status.bytes_budget:,}")
    table.add_row("log after the snapshot", f"{status.log_bytes:,}")
    table.add_row("snapshot", f"{status.snapshot_bytes:,}")
    if status.durability == "full":
        table.add_row("payload files", f"{status.payload_disk_bytes:,}")
    return table


def _servers(status: queue_pb2.RunStatus) -> Table:
    table = Table("rollout server", "confirmed version")
    for server, version in sorted(status.confirmed.items()):
        table.add_row(server, f"{version.lineage}.{version.number}")
    if status.counts.leased:
        table.caption = f"oldest lease: {status.oldest_lease_seconds:.1f} s"
    return table
