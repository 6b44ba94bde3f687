"""Puts on an event loop, over whatever lane there is."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from relax.queue.v1 import queue_pb2 as pb
from relax.queue.v1 import queue_pb2_grpc
from relax_common.errors import ArenaFull, SlabGone, UnknownSession, from_rpc
from relax_common.host_calls.aio_stub import AioHostStub
from relax_common.process.logs import get_logger
from relax_common.rpc.channels import CHUNK_BYTES, acall_with_retry, aio_channel
from relax_queue.client.lane import (
    DETACH_SECONDS,
    Lane,
    LaneName,
    closed,
    host_socket,
    map_arena,
    not_negotiated,
    reachable_on_host,
    seconds_left,
)
from relax_queue.client.plans import disposition
from relax_queue.client.rows_client import CALL_SECONDS, stream
from relax_queue.rows.column_block import Column, Layout, layout
from relax_queue.transport.frames import INLINE_BYTES
from relax_queue.transport.shm.shared import SharedMemory

T = TypeVar("T")
Waiting = tuple[pb.GroupPut, "asyncio.Future[pb.PutResult]"]


HELD_UP_SECONDS = 0.02
"""After this the next message leaves although the one before it is not answered."""


class AioLanes:
    """The lane of one client on an event loop."""

    def __init__(self, channel: grpc.aio.Channel, name: LaneName) -> None:
        self._direct = channel
        self._name = name
        self._lock = asyncio.Lock()
        self._lane: Lane | None = None
        self._shared: SharedMemory | None = None
        self._closed = False

    async def use(self, seconds: float) -> Lane:
        """The negotiated lane, to be given to `done` afterwards. Raises grpc.RpcError."""
        lane = self._lane
        if lane is None:
            lane = await self._negotiated(seconds)
        lane.users += 1
        return lane

    async def done(self, lane: Lane) -> None:
        lane.users -= 1
        if not lane.users and self._lane is not lane:
            await _close(lane)

    async def _negotiated(self, seconds: float) -> Lane:
        """By this call or by another one meanwhile."""
        end = time.monotonic() + seconds
        try:
            async with asyncio.timeout(seconds):
                await self._lock.acquire()
        except TimeoutError as error:
            raise not_negotiated(seconds) from error
        try:
            if self._closed:
                raise closed()
            if self._lane is None:
                self._lane = await self._negotiate(seconds_left(end))
            return self._lane
        finally:
            self._lock.release()

    async def _negotiate(self, seconds: float) -> Lane:
        stub: Any = queue_pb2_grpc.QueueServiceStub(self._direct)
        hello: pb.HelloResponse = await stub.Hello(pb.HelloRequest(), timeout=seconds)
        here = bool(hello.unix_target) and reachable_on_host(hello.unix_target)
        mapping = map_arena(hello, self._name)
        if mapping is None:
            self._shared = None
        elif self._shared is None or self._shared.mapping.secret != mapping.secret:
            request = pb.AttachRequest(pid=os.getpid(), secret=mapping.secret)
            attached: pb.AttachResponse = await stub.Attach(request, timeout=seconds)
            self._shared = SharedMemory(mapping, attached.session)
        socket_name = host_socket(hello, self._name, here=here)
        host_calls = (AioHostStub, socket_name) if socket_name else None
        lane = Lane(aio_channel(hello.unix_target) if here else self._direct, self._shared, host_calls, own=here)
        if self._closed:
            await _close(lane)
            raise closed()
        return lane

    def drop(self, lane: Lane, *, session_gone: bool = False) -> None:
        """The broker was not reached on this lane, or does not know its session: negotiate again."""
        if self._lane is lane:
            self._lane = None
            if session_gone:
                self._shared = None

    async def close(self) -> None:
        """Ends the session: what the client holds is free then. Calls in progress fail."""
        self._closed = True
        lane, self._lane = self._lane, None
        if lane is None:
            return
        if lane.shared is not None:
            try:
                await lane.stub.Detach(pb.DetachRequest(session=lane.shared.session), timeout=DETACH_SECONDS)
            except grpc.RpcError as error:
                get_logger().debug("session_not_detached", error=str(error))
        await _close(lane)


async def _close(lane: Lane) -> None:
    if lane.host_calls is not None:
        lane.host_calls.close()
    if lane.own:
        await lane.channel.close()


class AioRowsClient:
    """Puts of one event loop; small ones that come while a message is on its way travel together in the next."""

    def __init__(self, channel: grpc.aio.Channel, lane: LaneName) -> None:
        self._lanes = AioLanes(channel, lane)
        self._waiting: list[Waiting] = []
        self._sending: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        await self._lanes.close()

    async def put(self, header: pb.PutHeader, columns: Mapping[str, Column]) -> str:
        extent = layout(columns) if header.rows.runs else None
        header.size_bytes = extent.size if extent else 0  # the same for a repeat
        if extent is not None and extent.size > INLINE_BYTES:
            return await self._attempt(lambda lane, left: self._put_large(lane, header, extent, left), "Put")
        put = pb.GroupPut(header=header, extent=extent.joined() if extent else b"")
        return disposition(await self._put_small(put))

    async def return_group(self, header: pb.PutHeader, columns: Mapping[str, Column]) -> None:
        extent = layout(columns) if header.rows.runs else None
        header.size_bytes = extent.size if extent else 0
        first = pb.ReturnGroupRequest(header=header).SerializeToString()
        buffers = extent.buffers() if extent else []
        await self._attempt(lambda lane, left: lane.return_frames(stream(first, buffers), timeout=left), "ReturnGroup")

    async def _attempt(self, call: Callable[[Lane, float], Awaitable[T]], what: str) -> T:
        """Repeat a call while the broker is UNAVAILABLE, each time on a lane that may be new."""

        async def attempt(left: float) -> T:
            end = time.monotonic() + left
            for last in (False, True):
                lane = await self._lanes.use(seconds_left(end))
                try:
                    return await call(lane, seconds_left(end))
                except grpc.RpcError as rpc_error:
                    error = from_rpc(rpc_error)
                    gone = isinstance(error, UnknownSession)
                    if error.code is grpc.StatusCode.UNAVAILABLE or gone:
                        self._lanes.drop(lane, session_gone=gone)
                    if last or not gone:
                        raise
                finally:
                    await self._lanes.done(lane)
            raise AssertionError("the second attempt ends or raises")

        return await acall_with_retry(attempt, what=f"the queue ({what})", deadline_seconds=CALL_SECONDS)

    async def _put_large(self, lane: Lane, header: pb.PutHeader, extent: Layout, left: float) -> str:
        if lane.shared is not None:
            try:
                return await _put_shared(lane, lane.shared, header, extent, left)
            except (ArenaFull, SlabGone):
                pass  # a full arena, or a slab that came too late: gRPC carries the same rows
        if extent.size <= CHUNK_BYTES:
            content = extent.joined()
            request = pb.PutGroupsRequest(puts=[pb.GroupPut(header=header, extent=content)])
            several: pb.PutGroupsResponse = await lane.stub.PutGroups(request, timeout=left)
            return disposition(several.results[0])
        first = pb.PutRequest(header=header).SerializeToString()
        response: pb.PutResponse = await lane.put_frames(stream(first, extent.buffers()), timeout=left)
        return response.disposition

    async def _put_small(self, put: pb.GroupPut) -> pb.PutResult:
        result: asyncio.Future[pb.PutResult] = asyncio.get_running_loop().create_future()
        self._waiting.append((put, result))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        return await result

    async def _send(self) -> None:
        try:
            while self._waiting:
                batch = self._next_batch()
                call = asyncio.create_task(self._call(batch))
                self._calls.add(call)
                call.add_done_callback(partial(self._ended, batch))
                # A put may have to wait for a version; those behind it must not wait with it.
                await asyncio.wait({call}, timeout=HELD_UP_SECONDS)
        finally:
            self._sending = None

    def _next_batch(self) -> list[Waiting]:
        """The oldest puts that fit one message; one at least."""
        count, size = 0, 0
        for put, _ in self._waiting:
            size += len(put.extent)
            if count and size > CHUNK_BYTES:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _call(self, batch: list[Waiting]) -> None:
        request = pb.PutGroupsRequest(puts=[put for put, _ in batch])
        response: pb.PutGroupsResponse = await self._attempt(
            lambda lane, left: lane.stub.PutGroups(request, timeout=left), "Put"
        )
        for (_, result), answer in zip(batch, response.results, strict=True):
            if not result.done():
                result.set_result(answer)

    def _ended(self, batch: list[Waiting], call: asyncio.Task[None]) -> None:
        """However a call ends, nobody waits for it any longer."""
        self._calls.discard(call)
        error = None if call.cancelled() else call.exception()
        for _, result in batch:
            if call.cancelled():
                result.cancel()
            elif error is not None and not result.done():
                result.set_exception(error)


async def _put_shared(lane: Lane, shared: SharedMemory, header: pb.PutHeader, extent: Layout, left: float) -> str:
    taken = shared.take(extent.size)
    if taken is None:
        asked = pb.LeaseSlabRequest(session=shared.session, size_bytes=extent.size, unused=shared.unused())
        try:
            granted: pb.LeaseSlabResponse = await lane.stub.LeaseSlab(asked, timeout=left)
        except grpc.RpcError as rpc_error:
            shared.forget(*asked.unused)
            error = from_rpc(rpc_error)
            if isinstance(error, ArenaFull):
                raise error from rpc_error
            raise
        taken = shared.granted(granted.grant)
    request = shared.put_request(header, extent, taken)
    with ExitStack() as undo:
        undo.callback(shared.forget, taken[0], *request.unused)
        response: pb.PutGroupsResponse = await lane.stub.PutGroups(request, timeout=left)
        undo.pop_all()
    return disposition(shared.settle(taken, response))
