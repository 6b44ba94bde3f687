"""The side that answers: a servicer's unary methods, registered as at a gRPC server."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from relax_common.errors import InvalidInput, NotFound, RelaxError
from relax_common.host_calls import wire
from relax_common.process.logs import get_logger

BACKLOG = 1024
"""Connections that may come before the event loop looks."""
ACCEPTED_AT_ONCE = 64
ACCEPT_AGAIN_SECONDS = 0.2
"""Pause while the process has no descriptor left for a connection."""


class Handler(Protocol):
    """What gRPC's generated code registers for a method."""

    unary_unary: Any
    request_streaming: bool
    response_streaming: bool
    request_deserializer: Any
    response_serializer: Any


class HostServer:
    """Bound when it is made; answers after `start`. Its socket has a new name each time, and no file."""

    def __init__(self, service: str) -> None:
        """Raises OSError where the host has no such sockets."""
        self.name = f"{service}-{secrets.token_hex(8)}"
        self._handlers: dict[bytes, Handler] = {}
        self._connections: set[_Connection] = set()
        self._accepted: set[asyncio.Task[Any]] = set()
        self._again: asyncio.TimerHandle | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.bind("\0" + self.name)
        self._socket.listen(BACKLOG)

    # As generated code calls it at a grpc.aio.Server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The handlers by name say the same."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        for name, handler in handlers.items():
            if not (handler.request_streaming or handler.response_streaming):
                self._handlers[name.encode()] = handler

    async def start(self) -> None:
        self._listen()

    def _listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        """In the place of a server of the loop: that of uvloop ends for ever when descriptors run out."""
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                peer, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                get_logger().warning("host_call_not_accepted", error=str(error))
                loop.remove_reader(self._socket)
                self._again = loop.call_later(ACCEPT_AGAIN_SECONDS, self._listen)
                return
            made = loop.create_task(
                loop.connect_accepted_socket(lambda: _Connection(self._handlers, self._connections), peer)
            )
            self._accepted.add(made)
            made.add_done_callback(self._accepted.discard)

    def close(self) -> None:
        """Calls in progress are cancelled; their callers find the peer gone."""
        if self._socket.fileno() < 0:
            return
        if self._again is not None:
            self._again.cancel()
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        for made in self._accepted:
            made.cancel()
        for connection in list(self._connections):
            connection.hang_up()


class HostContext:
    """What handlers ask of a call."""

    def __init__(self, seconds: float, send_early: Callable[[Any], None]) -> None:
        self._end = time.monotonic() + seconds
        self._send_early = send_early
        self.sent: Any = None

    def time_remaining(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def send_early(self, answer: Any) -> None:
        self._send_early(answer)
        self.sent = answer


def answer_early(context: Any, answer: Any) -> None:
    """Let the caller read an answer while it becomes true, where its way allows that; once, and it must be returned.

    The caller takes it for an answer when the handler has returned it.
    """
    if isinstance(context, HostContext):
        context.send_early(answer)


class _Connection(asyncio.Protocol):
    def __init__(self, handlers: Mapping[bytes, Handler], connections: set[_Connection]) -> None:
        self._handlers = handlers
        self._connections = connections
        self._frames = wire.Frames()
        self._call: asyncio.Task[None] | None = None
        self._early = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._fd: int = transport.get_extra_info("socket").fileno()
        self._connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        if self._call is not None:
            self._call.cancel()

    def hang_up(self) -> None:
        self._transport.abort()
        if self._call is not None:
            self._call.cancel()  # at once: what it stands on may be closed next

    def pause_writing(self) -> None:
        """A peer that does not read its answers is not given more of them."""
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        try:
            if self._call is not None:
                raise InvalidInput("a call came before the one before it on this connection was answered")
            frame = self._frames.feed(data)
            if frame is None:
                return
            name, seconds, message = wire.read_request(frame)
        except InvalidInput as error:  # where the next frame would begin is unknown
            get_logger().warning("host_call_broken", error=error.message)
            self._transport.write(wire.refusal_frame(error))
            self._transport.close()
            return
        self._call = asyncio.get_running_loop().create_task(self._serve(name, seconds, message))
        self._call.add_done_callback(self._ended)

    async def _serve(self, name: bytes, seconds: float, message: bytes) -> None:
        try:
            handler = self._handlers.get(name)
            if handler is None:
                raise NotFound(f"method {name.decode(errors='replace')!r} is not among this service's unary methods")
            serialize = handler.response_serializer
            context = HostContext(seconds, lambda early: self._send_early(wire.early_frame(serialize(early))))
            answer = await handler.unary_unary(_request(handler, message), context)
            frame = wire.STANDS if answer is context.sent else wire.answer_frame(serialize(answer))
        except RelaxError as error:
            frame = wire.refusal_frame(error)
        self._answer(frame)

    def _answer(self, frame: bytes) -> None:
        self._call = None  # before the answer, which the next call may follow at once
        if self._early != (frame is wire.STANDS):
            get_logger().warning("host_call_recanted", reason="what was answered early is not true")
            self.hang_up()
            return
        self._early = False
        self._send(frame)

    def _send_early(self, frame: bytes) -> None:
        self._early = True
        self._send(frame)

    def _send(self, frame: bytes) -> None:
        if self._transport.is_closing():
            return
        sent = 0
        if not self._transport.get_write_buffer_size():
            # At once: the transport of uvloop would first let all other handlers of this round go on.
            with suppress(OSError):  # full or broken: the transport finds out
                sent = os.write(self._fd, frame)
        if sent < len(frame):
            self._transport.write(frame[sent:])

    def _ended(self, call: asyncio.Task[None]) -> None:
        if call.cancelled():
            self.hang_up()  # where not the peer did that, it must not wait for an answer
            return
        error = call.exception()
        if error is not None:
            get_logger().error("host_call_failed", exc_info=error)
            self._answer(wire.refusal_frame(RelaxError(f"{type(error).__name__}: {error}")))


def _request(handler: Handler, message: bytes) -> Any:
    try:
        return handler.request_deserializer(message)
    except DecodeError as error:
        raise InvalidInput(f"{len(message)} bytes came that are no message of this method: {error}") from error
