"""Client of the queue on an event loop, for servers that lease and put many groups at a time.

The same calls as `QueueClient`, without a thread hop for each: a group costs its server no more than its messages.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

import grpc
import grpc.aio

from relax.queue.v1 import queue_pb2 as pb
from relax.queue.v1 import queue_pb2_grpc
from relax_common.errors import DeadlineExceeded, from_rpc
from relax_common.rpc.channels import acall_with_retry, aio_channel
from relax_queue.client.aio_rows_client import AioRowsClient
from relax_queue.client.lane import LaneName
from relax_queue.client.rows_client import CALL_SECONDS
from relax_queue.rows.column_block import Column


class AioQueueClient:
    """One run at one queue. Construct and use it on the event loop."""

    def __init__(self, address: str, run: str, lane: LaneName = "auto") -> None:
        self._channel = aio_channel(address)
        self._stub = queue_pb2_grpc.QueueServiceStub(self._channel)
        self._rows = AioRowsClient(self._channel, lane)
        self.run = run

    async def close(self) -> None:
        await self._rows.close()
        await self._channel.close()

    async def register_term(self, holder: str, term: int) -> None:
        request = pb.RegisterTermRequest(run=self.run, holder=holder, term=term)
        await acall_with_retry(
            lambda left: self._stub.RegisterTerm(request, timeout=left),
            what="the queue (RegisterTerm)",
            deadline_seconds=CALL_SECONDS,
        )

    async def lease_groups(
        self, server: str, term: int, credits: int, wait_seconds: float
    ) -> AsyncIterator[pb.LeaseGroupsResponse]:
        """Up to `credits` leases as they are granted. After `wait_seconds` it ends; DeadlineExceeded names what was
        missing if none was granted.

        Not repeated when the connection breaks: a grant that was lost on the way runs out by its TTL.
        """
        request = pb.LeaseGroupsRequest(run=self.run, server=server, term=term, credits=credits)
        stream = self._stub.LeaseGroups(request, timeout=wait_seconds)
        granted = 0
        try:
            async for response in stream:
                granted += 1
                yield response
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc(rpc_error)
            if not (granted and isinstance(error, DeadlineExceeded)):
                raise error from rpc_error
        finally:
            stream.cancel()

    async def renew_leases(self, server: str, term: int, leases: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Extend leases named (group, attempt); those that are gone: stop working on them."""
        keys = [pb.LeaseKey(group=group, attempt=attempt) for group, attempt in leases]
        request = pb.RenewLeasesRequest(run=self.run, server=server, term=term, leases=keys)
        return [(key.group, key.attempt) for key in (await self._renew(request, CALL_SECONDS)).gone]

    async def lost_grants(
        self, server: str, term: int, leases: Sequence[tuple[str, int]], wait_seconds: float
    ) -> list[tuple[str, int]]:
        """Leases that the queue has granted and that are not among these. Ask while no lease_groups is in progress."""
        keys = [pb.LeaseKey(group=group, attempt=attempt) for group, attempt in leases]
        request = pb.RenewLeasesRequest(run=self.run, server=server, term=term, leases=keys, list_others=True)
        return [(key.group, key.attempt) for key in (await self._renew(request, wait_seconds)).others]

    async def _renew(self, request: pb.RenewLeasesRequest, seconds: float) -> pb.RenewLeasesResponse:
        response: pb.RenewLeasesResponse = await acall_with_retry(
            lambda left: self._stub.RenewLeases(request, timeout=left),
            what="the queue (RenewLeases)",
            deadline_seconds=seconds,
        )
        return response

    async def put(self, header: pb.PutHeader, columns: Mapping[str, Column]) -> str:
        """Store whole samples and, with completes_group, complete the group; "accepted", "dropped" or "sent_back".

        Samples that an earlier lease left are replaced. `header.size_bytes` is filled in here.
        """
        return await self._rows.put(header, columns)

    async def return_group(self, header: pb.PutHeader, columns: Mapping[str, Column]) -> None:
        """Give a group back to the front of the line together with the whole samples in `columns`, if any."""
        await self._rows.return_group(header, columns)
