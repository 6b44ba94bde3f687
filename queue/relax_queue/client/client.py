"""The client of the queue, as coroutines. Threads use it through `threads.QueueClient`.

Every method has a deadline. Calls whose key makes a repeat harmless are repeated while the queue is UNAVAILABLE; errors
are those of relax_common.errors.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

import xxhash

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import DeadlineExceeded
from relax_common.rows import RowKey
from relax_queue.client.connection import CALL_SECONDS, Connection, Transport, TransportName
from relax_queue.client.plans import PlanAnswer, plan_from
from relax_queue.client.rows import RowsClient, block_of
from relax_queue.rows.column_block import Column, layout
from relax_queue.rows.row_keys import block_to

Lease = tuple[str, int]
"""A leased group and the attempt of the lease."""


class AioQueueClient:
    """One run at one queue. Construct and use it on one event loop."""

    def __init__(self, address: str, run: str, transport: TransportName = "auto") -> None:
        self.connection = Connection(address, transport)
        self.rows = RowsClient(self.connection, run)
        self._stub = self.connection.stub
        self.run = run

    async def close(self) -> None:
        await self.connection.close()

    async def transport(self) -> str:
        """How payload is transferred, for people."""

        async def name(transport: Transport, left: float) -> str:
            return transport.name

        return await self.connection.attempt(name, "the queue")

    # Runs

    async def open_run(self, spec: pb.RunSpec, recipe_digest: str, dcs_address: str) -> pb.OpenRunResponse:
        request = pb.OpenRunRequest(run=self.run, recipe_digest=recipe_digest, spec=spec, dcs_address=dcs_address)
        response: pb.OpenRunResponse = await self.connection.call(self._stub.OpenRun, request)
        return response

    async def register_term(self, holder: str, term: int) -> None:
        request = pb.RegisterTermRequest(run=self.run, holder=holder, term=term)
        await self.connection.call(self._stub.RegisterTerm, request)

    async def seal(self) -> None:
        await self.connection.call(self._stub.SealRun, pb.SealRunRequest(run=self.run))

    async def end(self) -> pb.LedgerCounts:
        response: pb.EndRunResponse = await self.connection.call(self._stub.EndRun, pb.EndRunRequest(run=self.run))
        return response.counts

    async def status(self) -> pb.RunStatus:
        request = pb.GetStatusRequest(run=self.run)
        response: pb.GetStatusResponse = await self.connection.call(self._stub.GetStatus, request)
        return response.runs[0]

    async def inspect(self, group: str) -> pb.InspectResponse:
        request = pb.InspectRequest(run=self.run, group=group)
        response: pb.InspectResponse = await self.connection.call(self._stub.Inspect, request)
        return response

    async def partitions(self) -> list[pb.Partition]:
        request = pb.ListPartitionsRequest(run=self.run)
        response: pb.ListPartitionsResponse = await self.connection.call(self._stub.ListPartitions, request)
        return list(response.partitions)

    async def watch_events(self, after_revision: int, wait_seconds: float) -> AsyncIterator[pb.WatchEventsResponse]:
        """Events after a revision, then each new one; ends with the run or once `wait_seconds` have passed."""
        request = pb.WatchEventsRequest(run=self.run, after_revision=after_revision)
        try:
            async for event in self.connection.stream(self._stub.WatchEvents, request, wait_seconds):
                yield event
        except DeadlineExceeded:
            return

    # Groups

    async def offer_groups(
        self, groups: Sequence[pb.PromptGroup], term: int, after_dcs_revision: int = 0
    ) -> tuple[int, int]:
        """(new, known before). Waits until the broker has applied `after_dcs_revision`."""
        request = pb.OfferGroupsRequest(run=self.run, groups=groups, after_dcs_revision=after_dcs_revision, term=term)
        response: pb.OfferGroupsResponse = await self.connection.call(self._stub.OfferGroups, request)
        return response.accepted, response.known

    async def lease_groups(
        self, server: str, term: int, credits: int, wait_seconds: float
    ) -> AsyncIterator[pb.LeaseGroupsResponse]:
        """Up to `credits` leases as they are granted. After `wait_seconds` it ends; DeadlineExceeded names what was
        missing if none was granted.

        Not repeated when the connection breaks: a grant that was lost on the way runs out by its TTL.
        """
        request = pb.LeaseGroupsRequest(run=self.run, server=server, term=term, credits=credits)
        granted = 0
        try:
            async for lease in self.connection.stream(self._stub.LeaseGroups, request, wait_seconds):
                granted += 1
                yield lease
        except DeadlineExceeded:
            if not granted:
                raise

    async def renew_leases(self, server: str, term: int, leases: Sequence[Lease]) -> list[Lease]:
        """Extend leases. Returns those that are gone: stop working on them."""
        request = pb.RenewLeasesRequest(run=self.run, server=server, term=term, leases=_keys(leases))
        response: pb.RenewLeasesResponse = await self.connection.call(self._stub.RenewLeases, request)
        return [(key.group, key.attempt) for key in response.gone]

    async def lost_grants(
        self, server: str, term: int, leases: Sequence[Lease], wait_seconds: float = CALL_SECONDS
    ) -> list[Lease]:
        """Leases that the queue has granted and that are not among these. Call it while no lease_groups is in
        progress."""
        request = pb.RenewLeasesRequest(run=self.run, server=server, term=term, leases=_keys(leases), list_others=True)
        response: pb.RenewLeasesResponse = await self.connection.call(self._stub.RenewLeases, request, wait_seconds)
        return [(key.group, key.attempt) for key in response.others]

    async def put(self, header: pb.PutHeader, columns: Mapping[str, Column]) -> str:
        """Store whole samples and, with completes_group, complete the group; returns "accepted", "dropped" or
        "sent_back".

        Samples that an earlier lease left are replaced. `header.size_bytes` is filled in here.
        """
        return await self.rows.put(header, block_of(header, columns))

    async def return_group(self, header: pb.PutHeader, columns: Mapping[str, Column]) -> None:
        """Give a group back to the front of the pending queue with the whole samples in `columns`, if any."""
        block = block_of(header, columns)
        header.size_bytes = block.size if block else 0
        await self.rows.send("return_frames", header, pb.ReturnGroupRequest, block.buffers() if block else ())

    async def write_field(self, role: str, term: int, field: str, rows: Sequence[RowKey], column: Column) -> None:
        """Add a role's column to rows; sample- and group-scoped values by first appearance."""
        block = layout({field: column})
        header = pb.WriteFieldHeader(
            run=self.run, role=role, term=term, field=field, rows=block_to(rows), size_bytes=block.size
        )
        await self.rows.send("write_frames", header, pb.WriteFieldRequest, block.buffers())

    # Plans and rows

    async def get_plan(
        self,
        consumer: str,
        term: int,
        lineage: int,
        step: int,
        chunk: int,
        generation: int = 0,
        wait_seconds: float = CALL_SECONDS,
    ) -> PlanAnswer:
        """A chunk of a step, or its closing, or the end of the run. DeadlineExceeded names what is missing."""
        request = pb.GetPlanRequest(
            run=self.run, consumer=consumer, term=term, lineage=lineage, step=step, chunk=chunk, generation=generation
        )
        response: pb.GetPlanResponse = await self.connection.attempt(
            lambda transport, left: transport.stub.GetPlan(request, timeout=left),
            f"the queue (plan of step {step})",
            wait_seconds,
        )
        return plan_from(response)

    async def read_rows(
        self, plan: pb.PlanKey, rows: Sequence[RowKey], fields: Sequence[str], wait_seconds: float = CALL_SECONDS
    ) -> dict[str, Column]:
        """Columns over `rows`, samples and groups by first appearance; read-only, where possible the queue's memory.

        DeadlineExceeded names the fields that are not written yet.
        """
        return await self.rows.read(plan, rows, fields, wait_seconds)

    # Blobs

    async def put_blob(self, content: bytes) -> str:
        """Store a blob; its hash."""
        name = xxhash.xxh3_128_hexdigest(content)
        header = pb.BlobHeader(run=self.run, hash=name, size_bytes=len(content))
        await self.rows.send("blob_frames", header, pb.PutBlobRequest, [content])
        return name

    async def get_blob(self, name: str) -> bytes:
        return await self.rows.read_blob(name)


def _keys(leases: Sequence[Lease]) -> list[pb.LeaseKey]:
    return [pb.LeaseKey(group=group, attempt=attempt) for group, attempt in leases]
