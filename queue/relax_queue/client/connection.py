"""The connection of one client to one broker, and the transport of its payload.

The transport is negotiated at first use, and again after either side was replaced.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

import grpc
import grpc.aio

from relax.queue.v1 import queue_pb2 as pb
from relax.queue.v1 import queue_pb2_grpc
from relax_common.errors import CallFailed, DeadlineExceeded, Precondition, RelaxError, UnknownSession, from_rpc
from relax_common.process.telemetry import get_logger
from relax_common.rpc.channels import acall_with_retry, aio_channel
from relax_queue.transport.shm.mapping import Mapping
from relax_queue.transport.shm.shared import SharedMemory

T = TypeVar("T")

TransportName = Literal["auto", "grpc", "shm"]
"""auto: shared memory where both sides are on one host, gRPC otherwise. grpc, shm: only that."""
CALL_SECONDS = 60.0
"""How long a call is repeated or waits by default."""
DETACH_SECONDS = 1.0
"""How long a client that closes waits for a broker that does not answer."""
_PATH = f"/{pb.DESCRIPTOR.services_by_name['QueueService'].full_name}/"


class Transport:
    """A way to one broker: stubs over a channel and, on the same host, shared memory.

    `own`: only this transport uses the channel. A transport that was dropped is closed when its last call has ended.
    """

    def __init__(self, channel: grpc.aio.Channel, shared: SharedMemory | None, *, own: bool) -> None:
        self.channel = channel
        self.shared = shared
        self.own = own
        self.calls = 0
        """Calls in progress."""
        self.stub: Any = queue_pb2_grpc.QueueServiceStub(channel)
        # Frames are bytes as they are: serialising them again would copy them.
        sends: Any = channel.stream_unary
        reads: Any = channel.unary_stream
        self.put_frames = sends(f"{_PATH}Put", None, pb.PutResponse.FromString)
        self.return_frames = sends(f"{_PATH}ReturnGroup", None, pb.ReturnGroupResponse.FromString)
        self.write_frames = sends(f"{_PATH}WriteField", None, pb.WriteFieldResponse.FromString)
        self.blob_frames = sends(f"{_PATH}PutBlob", None, pb.PutBlobResponse.FromString)
        self.read_frames = reads(f"{_PATH}ReadRows", pb.ReadRowsRequest.SerializeToString, None)
        self.read_blob = reads(f"{_PATH}GetBlob", pb.GetBlobRequest.SerializeToString, None)

    @property
    def name(self) -> str:
        """For people."""
        if self.shared is not None:
            return "shm"
        return "grpc over a host socket" if self.own else "grpc"

    async def close(self) -> None:
        if self.own:
            await self.channel.close()


class Connection:
    """Use it on one event loop. Errors are those of relax_common.errors."""

    def __init__(self, address: str, name: TransportName) -> None:
        self._direct = aio_channel(address)
        self._name = name
        self._lock = asyncio.Lock()
        self._transport: Transport | None = None
        self._shared: SharedMemory | None = None
        self._closed = False
        self.stub: Any = queue_pb2_grpc.QueueServiceStub(self._direct)
        """For calls that carry no payload."""

    # Calls

    async def call(self, method: Any, request: Any, seconds: float = CALL_SECONDS) -> Any:
        """Repeat a call without payload while the broker is UNAVAILABLE; its key makes a repeat harmless."""
        what = type(request).__name__.removesuffix("Request")

        async def once(left: float) -> Any:
            async with self._until_closed():
                return await method(request, timeout=left)

        return await acall_with_retry(once, what=f"the queue ({what})", deadline_seconds=seconds)

    async def attempt(
        self, call: Callable[[Transport, float], Awaitable[T]], what: str, seconds: float = CALL_SECONDS
    ) -> T:
        """Repeat `call(transport, seconds left)` while the broker is UNAVAILABLE, on the transport of that moment."""

        async def once(left: float) -> T:
            end = time.monotonic() + left
            for last in (False, True):
                transport = await self.use(_seconds_left(end))
                try:
                    async with self._until_closed():
                        return await call(transport, _seconds_left(end))
                except grpc.RpcError as rpc_error:
                    error = from_rpc(rpc_error)
                    gone = isinstance(error, UnknownSession)
                    if error.code is grpc.StatusCode.UNAVAILABLE or gone:
                        self.drop(transport, session_gone=gone)
                    if last or not gone:
                        raise
                finally:
                    await self.done(transport)
            raise AssertionError("the second attempt ends or raises")

        return await acall_with_retry(once, what=what, deadline_seconds=seconds)

    async def stream(self, method: Any, request: Any, seconds: float) -> AsyncIterator[Any]:
        """Messages of a stream without payload, which is not repeated; DeadlineExceeded once the seconds are over."""
        try:
            async with self._until_closed():
                call = method(request, timeout=seconds)
                try:
                    async for message in call:
                        yield message
                finally:
                    call.cancel()
        except grpc.RpcError as rpc_error:
            raise from_rpc(rpc_error) from rpc_error

    @asynccontextmanager
    async def _until_closed(self) -> AsyncIterator[None]:
        """If this client is closed during a call, the call ends with an error that says so.

        gRPC cancels the calls of a channel that is closed. A task that its owner cancels stays cancelled.
        """
        if self._closed:
            raise _closed()
        try:
            yield
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            raise _closed() from error

    # Transports

    async def use(self, seconds: float) -> Transport:
        """The negotiated transport; pass it to `done` afterwards. Raises grpc.RpcError."""
        transport = self._transport
        if transport is None:
            transport = await self._negotiated(seconds)
        transport.calls += 1
        return transport

    async def done(self, transport: Transport) -> None:
        transport.calls -= 1
        if not transport.calls and self._transport is not transport:
            await transport.close()

    def drop(self, transport: Transport, *, session_gone: bool = False) -> None:
        """The broker was not reached on this transport, or does not know its session: negotiate again."""
        if self._transport is transport:
            self._transport = None
            if session_gone:
                self._shared = None

    async def _negotiated(self, seconds: float) -> Transport:
        """Negotiate, unless another call has done so in the meantime."""
        end = time.monotonic() + seconds
        try:
            async with asyncio.timeout(seconds):
                await self._lock.acquire()
        except TimeoutError as error:
            late = f"waited {seconds:.1f} s for another call to negotiate a transport to the queue"
            raise CallFailed(DeadlineExceeded(late)) from error
        try:
            if self._transport is None:
                async with self._until_closed():
                    self._transport = await self._negotiate(_seconds_left(end))
            return self._transport
        finally:
            self._lock.release()

    async def _negotiate(self, seconds: float) -> Transport:
        hello: pb.HelloResponse = await self.stub.Hello(pb.HelloRequest(), timeout=seconds)
        here = bool(hello.unix_target) and _reachable_on_host(hello.unix_target)
        mapping = _map_arena(hello, self._name)
        if mapping is None:
            self._shared = None
        elif self._shared is None or self._shared.mapping.secret != mapping.secret:
            request = pb.AttachRequest(pid=os.getpid(), secret=mapping.secret)
            attached: pb.AttachResponse = await self.stub.Attach(request, timeout=seconds)
            self._shared = SharedMemory(mapping, attached.session)
        transport = Transport(aio_channel(hello.unix_target) if here else self._direct, self._shared, own=here)
        if self._closed:
            await transport.close()
            raise _closed()
        return transport

    async def close(self) -> None:
        """End all calls in progress and the session, so that everything the client holds is freed."""
        self._closed = True
        transport, self._transport = self._transport, None
        if transport is not None:
            if transport.shared is not None:
                request = pb.DetachRequest(session=transport.shared.session)
                try:
                    await transport.stub.Detach(request, timeout=DETACH_SECONDS)
                except grpc.RpcError as error:
                    get_logger().debug("session_not_detached", error=str(error))
            await transport.close()
        await self._direct.close()


def _closed() -> CallFailed:
    """The error of calls on a closed client; repeating them cannot help."""
    return CallFailed(RelaxError("the client of the queue is closed"))


def _seconds_left(end: float) -> float:
    """Seconds left until `end`, in time.monotonic() seconds."""
    return max(0.0, end - time.monotonic())


def _reachable_on_host(target: str) -> bool:
    """Does the broker's own socket answer here? Its name is random, so it cannot be another queue's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect("\0" + target.removeprefix("unix-abstract:"))
        except BlockingIOError:
            return True  # it exists, but has many callers at the moment
        except OSError:
            return False
    return True


def _map_arena(hello: pb.HelloResponse, name: TransportName) -> Mapping | None:
    """The broker's arena, or None if this process cannot map it; raises Precondition if only shared memory is
    allowed."""
    if name == "grpc":
        return None
    try:
        if not hello.arena_pid:
            raise OSError("it has none")
        return Mapping(hello.arena_pid, hello.arena_fd, hello.arena_bytes)
    except OSError as error:
        if name == "shm":
            raise Precondition(
                f"the queue's arena cannot be mapped: {error}; use the transport auto or grpc"
            ) from error
        get_logger().debug("arena_not_mapped", error=str(error))
        return None
