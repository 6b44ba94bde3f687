"""The side that calls, on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor

from relax_common.errors import InvalidInput, RelaxError
from relax_common.host_calls import wire
from relax_common.host_calls.stub import CONNECTIONS_MAX, connected, unary_methods


class AioHostStub:
    """As HostStub, with methods to await; `beyond` is a stub of grpc.aio."""

    def __init__(self, service: ServiceDescriptor, name: str, beyond: Any) -> None:
        self._address = "\0" + name
        self._beyond = beyond
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._closed = False
        for method, parse in unary_methods(service).items():
            setattr(self, method, partial(self._call, method.encode(), parse))

    def close(self) -> None:
        """Calls in progress fail."""
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.hang_up()

    async def _call(self, name: bytes, parse: Callable[[bytes], Any], request: Any, *, timeout: float) -> Any:
        if len(self._busy) >= CONNECTIONS_MAX:
            return await getattr(self._beyond, name.decode())(request, timeout=timeout)
        try:
            frame = wire.request_frame(name, request.SerializeToString(), timeout)
            async with asyncio.timeout(timeout):
                answer = await self._exchange(frame)
            return wire.read_answer(answer, parse)
        except (RelaxError, OSError) as error:
            raise wire.failure(name, timeout, error) from error

    async def _exchange(self, frame: bytes) -> bytes:
        if self._closed:
            raise ConnectionError("the client is closed")
        connection = self._idle.pop() if self._idle else _Connection(self._address)
        self._busy.add(connection)
        answered = False
        try:
            answer = await connection.exchange(frame)
            answered = True
            return answer
        finally:  # on a connection that did not answer, an answer may still come
            self._busy.discard(connection)
            if answered and not self._closed:
                self._idle.append(connection)
            else:
                connection.hang_up()


class _Connection(asyncio.Protocol):
    def __init__(self, address: str) -> None:
        self._address = address
        self._frames = wire.Frames()
        self._transport: Any = None
        self._answer: asyncio.Future[bytes] | None = None
        self._lost = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._fail(error or ConnectionResetError("the peer hung up"))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.hang_up()
            return
        try:
            answer = self._frames.feed(data)
        except InvalidInput as error:
            self._fail(ConnectionResetError(error.message))
            self.hang_up()
            return
        if answer is not None:
            self._answer.set_result(answer)

    async def exchange(self, frame: bytes) -> bytes:
        """Raises OSError."""
        loop = asyncio.get_running_loop()
        if self._transport is None:
            # Made here: uvloop connects to no abstract socket, and asyncio takes one that has no room for connected.
            await loop.create_unix_connection(lambda: self, sock=connected(self._address))
        if self._lost:
            raise ConnectionResetError("the peer hung up")
        self._answer = loop.create_future()
        self._transport.write(frame)
        return await self._answer

    def hang_up(self) -> None:
        self._lost = True
        if self._transport is not None:
            self._transport.abort()
