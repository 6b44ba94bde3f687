"""Client of the queue on an event loop, for servers that lease and put many groups at a time.

The same calls as `QueueClient`, without a thread hop for each: a group costs its server no more than its messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from relax.queue.v1 import queue_pb2 as pb
from relax.queue.v1 import queue_pb2_grpc
from relax_common.channels import CHUNK_BYTES, acall_with_retry, aio_channel
from relax_common.errors import DeadlineExceeded, RelaxError, from_rpc
from relax_common.streams import chunks
from relax_queue.client import CALL_SECONDS
from relax_queue.client_values import disposition
from relax_queue.extent import Column, encode


class AioQueueClient:
    """One run at one queue. Construct and use it on the event loop."""

    def __init__(self, address: str, run: str) -> None:
        self._channel = aio_channel(address)
        self._stub = queue_pb2_grpc.QueueServiceStub(self._channel)
        self._puts = _Puts(self._stub)
        self.run = run

    async def close(self) -> None:
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
        response: pb.RenewLeasesResponse = await acall_with_retry(
            lambda left: self._stub.RenewLeases(request, timeout=left),
            what="the queue (RenewLeases)",
            deadline_seconds=CALL_SECONDS,
        )
        return [(key.group, key.attempt) for key in response.gone]

    async def put(self, header: pb.PutHeader, columns: Mapping[str, Column]) -> str:
        """Store whole samples and, with completes_group, complete the group; "accepted", "dropped" or "sent_back".

        Samples that an earlier lease left are replaced. `header.size_bytes` is filled in here.
        """
        payload = _block(header, columns)
        if len(payload) > CHUNK_BYTES:
            response: pb.PutResponse = await self._send(self._stub.Put, pb.PutRequest, header, payload)
            return response.disposition
        return disposition(await self._puts.put(pb.GroupPut(header=header, extent=payload)))

    async def return_group(self, header: pb.PutHeader, columns: Mapping[str, Column]) -> None:
        """Give a group back to the front of the line together with the whole samples in `columns`, if any."""
        await self._send(self._stub.ReturnGroup, pb.ReturnGroupRequest, header, _block(header, columns))

    async def _send(self, method: Any, frame: Any, header: pb.PutHeader, payload: bytes) -> Any:
        frames = [frame(header=header), *(frame(chunk=chunk) for chunk in chunks(payload))]
        what = f"the queue ({frame.DESCRIPTOR.name.removesuffix('Request')})"
        return await acall_with_retry(
            lambda left: method(iter(frames), timeout=left), what=what, deadline_seconds=CALL_SECONDS
        )


class _Puts:
    """One message at a time is on its way; puts that come meanwhile travel together in the next one."""

    def __init__(self, stub: queue_pb2_grpc.QueueServiceStub) -> None:
        self._stub = stub
        self._waiting: list[tuple[pb.GroupPut, asyncio.Future[pb.PutResult]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def put(self, put: pb.GroupPut) -> pb.PutResult:
        result: asyncio.Future[pb.PutResult] = asyncio.get_running_loop().create_future()
        self._waiting.append((put, result))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        return await result

    async def _send(self) -> None:
        try:
            while self._waiting:
                await self._call(self._next_batch())
        finally:
            self._sending = None

    def _next_batch(self) -> list[tuple[pb.GroupPut, asyncio.Future[pb.PutResult]]]:
        """The oldest puts that fit one message; one at least."""
        count, size = 0, 0
        for put, _ in self._waiting:
            size += len(put.extent)
            if count and size > CHUNK_BYTES:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _call(self, batch: list[tuple[pb.GroupPut, asyncio.Future[pb.PutResult]]]) -> None:
        request = pb.PutGroupsRequest(puts=[put for put, _ in batch])
        try:
            response: pb.PutGroupsResponse = await acall_with_retry(
                lambda left: self._stub.PutGroups(request, timeout=left),
                what="the queue (Put)",
                deadline_seconds=CALL_SECONDS,
            )
        except RelaxError as error:
            for _, result in batch:
                if not result.done():
                    result.set_exception(error)
            return
        for (_, result), answer in zip(batch, response.results, strict=True):
            if not result.done():
                result.set_result(answer)


def _block(header: pb.PutHeader, columns: Mapping[str, Column]) -> bytes:
    """The extent of a put; its size is the same for a repeat."""
    payload = encode(columns) if header.rows else b""
    header.size_bytes = len(payload)
    return payload
