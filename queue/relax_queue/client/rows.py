"""The part of the client that moves rows: puts and reads over the negotiated transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc
import grpc.aio

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import ArenaFull, CallFailed, DataLoss, SlabGone, Unavailable, from_rpc
from relax_common.rows import RowKey
from relax_common.rpc.channels import CHUNK_BYTES
from relax_queue.client.connection import Connection, Transport
from relax_queue.client.plans import disposition
from relax_queue.rows.column_block import Column, Digest, Layout, decode, layout
from relax_queue.rows.row_keys import block_to
from relax_queue.transport.buffers import Buffers
from relax_queue.transport.frames import ACCEPTED, INLINE_BYTES, REQUEST_CHUNK, RESPONSE_CHUNK, chunk_of, frames
from relax_queue.transport.shm.shared import SharedMemory

Waiting = tuple[pb.GroupPut, "asyncio.Future[pb.PutResult]"]

HELD_UP_SECONDS = 0.02
"""After this time the next message is sent even if the one before it is not answered yet."""


class RowsClient:
    """Small puts that arrive while a message is in progress are sent together in the next one."""

    def __init__(self, connection: Connection, run: str) -> None:
        self._connection = connection
        self._run = run
        self._buffers = Buffers()
        self._waiting: list[Waiting] = []
        self._sending: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()

    # Puts

    async def put(self, header: pb.PutHeader, block: Layout | None) -> str:
        """Put rows; returns the disposition of the group. `header.size_bytes` is filled in here."""
        header.size_bytes = block.size if block else 0  # the same for a repeat
        if block is not None and block.size > INLINE_BYTES:
            return await self._connection.attempt(
                lambda transport, left: _put_large(transport, header, block, left), "the queue (Put)"
            )
        put = pb.GroupPut(header=header, block=block.joined() if block else b"")
        return disposition(await self._put_small(put))

    async def _put_small(self, put: pb.GroupPut) -> pb.PutResult:
        result: asyncio.Future[pb.PutResult] = asyncio.get_running_loop().create_future()
        self._waiting.append((put, result))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_small())
        return await result

    async def _send_small(self) -> None:
        try:
            while self._waiting:
                batch = self._next_batch()
                call = asyncio.create_task(self._put_batch(batch))
                self._calls.add(call)
                call.add_done_callback(partial(self._ended, batch))
                # A put may have to wait for a version; later puts must not wait for it.
                await asyncio.wait({call}, timeout=HELD_UP_SECONDS)
        finally:
            self._sending = None

    def _next_batch(self) -> list[Waiting]:
        """The oldest puts that fit in one message; at least one."""
        count, size = 0, 0
        for put, _ in self._waiting:
            size += len(put.block)
            if count and size > CHUNK_BYTES:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _put_batch(self, batch: list[Waiting]) -> None:
        request = pb.PutGroupsRequest(puts=[put for put, _ in batch])
        response: pb.PutGroupsResponse = await self._connection.attempt(
            lambda transport, left: transport.stub.PutGroups(request, timeout=left), "the queue (Put)"
        )
        for (_, result), answer in zip(batch, response.results, strict=True):
            if not result.done():
                result.set_result(answer)

    def _ended(self, batch: list[Waiting], call: asyncio.Task[None]) -> None:
        """However the call ends, every put in it gets a result or an error."""
        self._calls.discard(call)
        error = None if call.cancelled() else call.exception()
        for _, result in batch:
            if call.cancelled():
                result.cancel()
            elif error is not None and not result.done():
                result.set_exception(error)

    # Streams

    async def send(self, method: str, header: Any, frame: type[Any], payload: Iterable[bytes | memoryview]) -> Any:
        """A stream of a header and chunks."""
        first, buffers = frame(header=header).SerializeToString(), list(payload)
        return await self._connection.attempt(
            lambda transport, left: _send(getattr(transport, method), first, buffers, left),
            f"the queue ({frame.DESCRIPTOR.name.removesuffix('Request')})",
        )

    async def read_blob(self, name: str) -> bytes:
        request = pb.GetBlobRequest(run=self._run, hash=name)

        async def call(transport: Transport, left: float) -> bytes:
            return b"".join([_chunk(frame) async for frame in transport.read_blob(request, timeout=left)])

        return await self._connection.attempt(call, f"blob {name} at the queue")

    # Reads

    async def read(
        self, plan: pb.PlanKey, rows: Sequence[RowKey], fields: Sequence[str], wait_seconds: float
    ) -> dict[str, Column]:
        block = block_to(rows)

        async def call(transport: Transport, left: float) -> dict[str, Column]:
            shared = transport.shared
            request = pb.FetchRowsRequest(run=self._run, plan=plan, rows=block, fields=fields)
            if shared is not None:
                request.session, request.closed_views = shared.session, shared.closed_views()
            with ExitStack() as undo:
                if shared is not None:
                    undo.callback(shared.not_told, request.closed_views)
                response: pb.FetchRowsResponse = await transport.stub.FetchRows(request, timeout=left)
                undo.pop_all()
            kind = response.WhichOneof("answer")
            if kind == "block":
                return decode(response.block)
            if kind == "placed" and shared is not None:
                return shared.columns(response.placed)
            wanted = pb.ReadRowsRequest(run=self._run, plan=plan, rows=block, fields=fields)
            stream = transport.read_frames(wanted, timeout=left)
            return await _decode_frames(stream, self._buffers.take(response.size_bytes))

        return await self._connection.attempt(call, f"rows of step {plan.step} at the queue", wait_seconds)


async def _put_large(transport: Transport, header: pb.PutHeader, block: Layout, left: float) -> str:
    if transport.shared is not None:
        try:
            return await put_shared(transport, transport.shared, header, block, left)
        except (ArenaFull, SlabGone):
            pass  # the arena is full, or the slab came too late: send the same rows by gRPC
    if block.size <= CHUNK_BYTES:
        request = pb.PutGroupsRequest(puts=[pb.GroupPut(header=header, block=block.joined())])
        several: pb.PutGroupsResponse = await transport.stub.PutGroups(request, timeout=left)
        return disposition(several.results[0])
    first = pb.PutRequest(header=header).SerializeToString()
    response: pb.PutResponse = await _send(transport.put_frames, first, block.buffers(), left)
    return response.disposition


async def put_shared(
    transport: Transport, shared: SharedMemory, header: pb.PutHeader, block: Layout, left: float
) -> str:
    """Write the rows into a slab and tell the broker. Raises ArenaFull or SlabGone if gRPC must be used instead."""
    taken = shared.take(block.size)
    if taken is None:
        asked = pb.GrantSlabRequest(session=shared.session, size_bytes=block.size, unused=shared.unused())
        with ExitStack() as undo:
            undo.callback(shared.forget, *asked.unused)
            try:
                granted: pb.GrantSlabResponse = await transport.stub.GrantSlab(asked, timeout=left)
            except grpc.RpcError as rpc_error:
                error = from_rpc(rpc_error)
                if isinstance(error, ArenaFull):
                    raise error from rpc_error
                raise
            undo.pop_all()
        taken = shared.granted(granted.grant)
    request = shared.put_request(header, block, taken)
    with ExitStack() as undo:
        undo.callback(shared.forget, taken[0], *request.unused)
        response: pb.PutGroupsResponse = await transport.stub.PutGroups(request, timeout=left)
        undo.pop_all()
    return disposition(shared.settle(taken, response))


def block_of(header: pb.PutHeader, columns: Mapping[str, Column]) -> Layout | None:
    """The layout of a put's columns in one block; None if the put has no rows."""
    return layout(columns) if header.rows.spans else None


async def _send(method: Any, first: bytes, buffers: Iterable[bytes | memoryview], left: float) -> Any:
    """A header and then chunks, which are sent once the broker has accepted the header.

    A refusal that arrived while chunks are being sent would be lost: gRPC would only report that it could not send.
    """
    call = method(None, timeout=left)
    await call.write(first)
    if ACCEPTED in tuple(await call.initial_metadata()):
        try:
            for frame in frames(buffers, REQUEST_CHUNK):
                await call.write(frame)
            await call.done_writing()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INTERNAL:
                raise
            raise CallFailed(Unavailable("the queue ended a call whose bytes were on their way")) from error
    return await call


def _chunk(frame: bytes) -> memoryview:
    chunk = chunk_of(frame, RESPONSE_CHUNK)
    if chunk is None:
        raise DataLoss("the queue sent a frame that is not a chunk")
    return chunk


async def _decode_frames(stream: AsyncIterable[bytes], buffer: memoryview) -> dict[str, Column]:
    """Decode the columns from frames, which must fill the buffer exactly."""
    size_bytes = len(buffer)
    digest, at = Digest(), 0
    async for frame in stream:
        chunk = _chunk(frame)
        if at + len(chunk) > size_bytes:
            raise DataLoss(f"more than the announced {size_bytes} bytes of rows arrived")
        buffer[at : at + len(chunk)] = chunk
        digest.update(chunk)
        at += len(chunk)
    if at != size_bytes:
        raise DataLoss(f"{at} of the announced {size_bytes} bytes of rows arrived")
    return decode(buffer, digest=digest.value())
