"""`relaxctl queue`: shows what the sample bus holds, one of its groups, and its events."""

from __future__ import annotations

import json
from collections.abc import Iterator

import grpc
from rich.console import Console
from rich.table import Table

from relax.common.v1 import common_pb2
from relax.controller.v1 import controller_pb2
from relax.queue.v1 import queue_pb2, queue_pb2_grpc
from relax_common.errors import EventsCompacted, NotFound, from_rpc
from relax_common.rpc.channels import call_with_retry, sync_channel
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
    raise NotFound(f"relaxd at {controller} knows no queue that is alive; name one with --queue host:port")


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

    def status(self, run: str) -> int:
        """Counts, bytes, leases, waits and kept steps of one run or all."""
        for status in self._runs(run):
            state = queue_pb2.RunState.Name(status.state).removeprefix("RUN_STATE_").lower()
            head = (
                f"version {status.head.lineage}.{status.head.number}" if status.HasField("head") else "no version yet"
            )
            self._console.print(
                f"[bold]{status.run}[/bold] {state}, {head}, durability {status.durability}, dcs record "
                f"{status.applied_revision}",
                highlight=False,
            )
            for table in (_groups(status), _bytes(status), _servers(status), self._partitions(status.run)):
                if table.row_count:
                    self._console.print(table)
            for wait in sorted(status.waits, key=lambda w: -w.seconds):
                self._console.print(f"  {wait.who} waits {wait.seconds:.1f} s for {wait.what}", highlight=False)
        return 0

    def _partitions(self, run: str) -> Table:
        response = call_with_retry(
            lambda s: self._stub.ListPartitions(queue_pb2.ListPartitionsRequest(run=run), timeout=s),
            what=f"the queue at {self._address}",
            deadline_seconds=CALL_SECONDS,
        )
        table = Table("partition", "generation", "chunks", "rows", "bytes", "state")
        for p in response.partitions:
            state = "committed, kept for a replay" if p.committed else "closed" if p.closed else "open"
            table.add_row(p.name, str(p.plan.generation), str(p.chunks), str(p.rows), f"{p.bytes:,}", state)
        return table

    def inspect(self, run: str, group: str) -> int:
        """State, rows and fields of one group."""
        found = call_with_retry(
            lambda s: self._stub.Inspect(queue_pb2.InspectRequest(run=run, group=group), timeout=s),
            what=f"the queue at {self._address}",
            deadline_seconds=CALL_SECONDS,
        )
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

    def watch(self, run: str, after_revision: int) -> int:
        """Events as they happen, until the run has ended."""
        for event in self._events(run, after_revision):
            detail = " ".join(f"{name}={value}" for name, value in json.loads(event.detail_json or "{}").items())
            time = event.time.ToDatetime().isoformat(sep=" ", timespec="milliseconds")
            line = f"{event.revision:>8} {time} {event.kind:<12} {event.group} {detail}"
            self._console.print(line.rstrip(), highlight=False, markup=False, soft_wrap=True)
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
            self._console.print(f"events before revision {first} are not kept any more", highlight=False)
            yield from self._events(run, first - 1)


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
    table.add_row("log behind the snapshot", f"{status.log_bytes:,}")
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
