"""The client of the queue for threads: the calls of `AioQueueClient`, each made through the portal."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from relax.queue.v1 import queue_pb2 as pb
from relax_common.rows import RowKey
from relax_common.rpc.portal import portal
from relax_queue.client.client import AioQueueClient, Lease
from relax_queue.client.connection import CALL_SECONDS, TransportName
from relax_queue.client.plans import PlanAnswer
from relax_queue.rows.column_block import Column

T = TypeVar("T")


class QueueClient:
    """One run at one queue. Thread-safe; each method is described in `AioQueueClient`."""

    def __init__(self, address: str, run: str, transport: TransportName = "auto") -> None:
        self._portal = portal()
        self.aio = self._portal.make(lambda: AioQueueClient(address, run, transport))
        self.run = run

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._portal.call(work)

    def close(self) -> None:
        self._call(self.aio.close())

    @property
    def transport(self) -> str:
        return self._call(self.aio.transport())

    def open_run(self, spec: pb.RunSpec, recipe_digest: str, dcs_address: str) -> pb.OpenRunResponse:
        return self._call(self.aio.open_run(spec, recipe_digest, dcs_address))

    def register_term(self, holder: str, term: int) -> None:
        self._call(self.aio.register_term(holder, term))

    def seal(self) -> None:
        self._call(self.aio.seal())

    def end(self) -> pb.LedgerCounts:
        return self._call(self.aio.end())

    def status(self) -> pb.RunStatus:
        return self._call(self.aio.status())

    def inspect(self, group: str) -> pb.InspectResponse:
        return self._call(self.aio.inspect(group))

    def partitions(self) -> list[pb.Partition]:
        return self._call(self.aio.partitions())

    def watch_events(self, after_revision: int, wait_seconds: float) -> Iterator[pb.WatchEventsResponse]:
        return self._portal.iterate(self.aio.watch_events(after_revision, wait_seconds))

    def offer_groups(self, groups: Sequence[pb.PromptGroup], term: int, after_dcs_revision: int = 0) -> tuple[int, int]:
        return self._call(self.aio.offer_groups(groups, term, after_dcs_revision))

    def lease_groups(
        self, server: str, term: int, credits: int, wait_seconds: float
    ) -> Iterator[pb.LeaseGroupsResponse]:
        return self._portal.iterate(self.aio.lease_groups(server, term, credits, wait_seconds))

    def renew_leases(self, server: str, term: int, leases: Sequence[Lease]) -> list[Lease]:
        return self._call(self.aio.renew_leases(server, term, leases))

    def put(self, header: pb.PutHeader, columns: Mapping[str, Column]) -> str:
        return self._call(self.aio.put(header, columns))

    def return_group(self, header: pb.PutHeader, columns: Mapping[str, Column]) -> None:
        self._call(self.aio.return_group(header, columns))

    def write_field(self, role: str, term: int, field: str, rows: Sequence[RowKey], column: Column) -> None:
        self._call(self.aio.write_field(role, term, field, rows, column))

    def get_plan(
        self,
        consumer: str,
        term: int,
        lineage: int,
        step: int,
        chunk: int,
        generation: int = 0,
        wait_seconds: float = CALL_SECONDS,
    ) -> PlanAnswer:
        return self._call(self.aio.get_plan(consumer, term, lineage, step, chunk, generation, wait_seconds))

    def read_rows(
        self, plan: pb.PlanKey, rows: Sequence[RowKey], fields: Sequence[str], wait_seconds: float = CALL_SECONDS
    ) -> dict[str, Column]:
        return self._call(self.aio.read_rows(plan, rows, fields, wait_seconds))

    def put_blob(self, content: bytes) -> str:
        return self._call(self.aio.put_blob(content))

    def get_blob(self, name: str) -> bytes:
        return self._call(self.aio.get_blob(name))
