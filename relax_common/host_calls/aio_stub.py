"""The side that calls, on an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor

from relax_common.errors import CallFailed, DeadlineExceeded, InvalidInput, Unavailable
from relax_common.host_calls import wire
from relax_common.host_calls.stub import unary_methods


class AioHostStub:
    """As HostStub, with methods to await."""

    def __init__(self, service: ServiceDescriptor, name: str) -> None:
        self._address = "\0" + name
        self._idle: deque[_Connection] = deque()
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
        frame = wire.request_frame(name, request.SerializeToString(), timeout)
        try:
            async with asyncio.timeout(timeout):
                answer = await self._exchange(frame)
        except TimeoutError as error:
            raise CallFailed(DeadlineExceeded(f"{name.decode()} was not answered within {timeout:.1f} s")) from error
        except OSError as error:
            raise CallFailed(Unavailable(f"{name.decode()} over a socket of this host: {error}")) from error
        return parse(wire.read_answer(answer))

    async def _exchange(self, frame: bytes) -> bytes:
        if self._closed:
            raise ConnectionError("the client is closed")
        connection = self._idle.pop() if self._idle else await self._connect()
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

    async def _connect(self) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_unix_connection(_Connection, self._address)
        return connection


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._frames = wire.Frames()
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
            self._transport.abort()
            return
        try:
            answer = self._frames.feed(data)
        except InvalidInput as error:
            self._fail(ConnectionResetError(error.message))
            self._transport.abort()
            return
        if answer is not None:
            self._answer.set_result(answer)

    async def exchange(self, frame: bytes) -> bytes:
        """Raises OSError."""
        if self._lost:
            raise ConnectionResetError("the peer hung up")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(frame)
        return await self._answer

    def hang_up(self) -> None:
        self._transport.abort()
