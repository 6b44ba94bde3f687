"""The side that calls, from threads."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from relax_common.errors import InvalidInput, RelaxError
from relax_common.host_calls import wire

RECEIVE_BYTES = 64 << 10
CONNECTIONS_MAX = 16
"""Calls of one stub at a time: those that wait for a version may be hundreds, too many for a daemon's descriptors."""


def unary_methods(service: ServiceDescriptor) -> dict[str, Callable[[bytes], Any]]:
    """Names of a service's unary methods, and what reads their answers."""
    return {
        method.name: GetMessageClass(method.output_type).FromString
        for method in service.methods
        if not (method.client_streaming or method.server_streaming)
    }


def connected(address: str) -> socket.socket:
    """Raises OSError; also at once where the peer takes no more connections just now."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.setblocking(False)
    try:
        made.connect(address)
    except OSError:
        made.close()
        raise
    return made


class HostStub:
    """Has a method for each unary one of a service, called as those of gRPC's stub, also by threads at once.

    Raises CallFailed. Each call has a connection for itself; those that are not in use are kept. `beyond` is gRPC's
    stub, which bears the calls beyond CONNECTIONS_MAX on one connection.
    """

    def __init__(self, service: ServiceDescriptor, name: str, beyond: Any) -> None:
        self._address = "\0" + name
        self._beyond = beyond
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._closed = False
        for method, parse in unary_methods(service).items():
            setattr(self, method, partial(self._call, method.encode(), parse))

    def close(self) -> None:
        """Calls in progress fail."""
        with self._lock:
            self._closed = True
            for connection in self._idle:
                connection.close()
            for connection in self._busy:
                connection.hang_up()

    def _call(
        self,
        name: bytes,
        parse: Callable[[bytes], Any],
        request: Any,
        *,
        timeout: float,
        then: Callable[[Any], Any] | None = None,
    ) -> Any:
        """`then`: applied to the answer, to an early one while it becomes true."""
        end = time.monotonic() + timeout
        read = parse if then is None else lambda message: then(parse(message))
        try:
            frame = wire.request_frame(name, request.SerializeToString(), timeout)
            connection = self._take()
            if connection is not None:
                return self._exchange(connection, frame, end, read)
        except (RelaxError, OSError) as error:
            raise wire.failure(name, timeout, error) from error
        answer = getattr(self._beyond, name.decode())(request, timeout=timeout)
        return answer if then is None else then(answer)

    def _exchange(self, connection: _Connection, frame: bytes, end: float, read: Callable[[bytes], Any]) -> Any:
        answered = False
        try:
            answer, early = connection.exchange(frame, end, read)
            answered = True
            return wire.read_answer(answer, read) if early is None else early
        finally:  # on a connection that did not answer, an answer may still come
            with self._lock:
                self._busy.discard(connection)
                if answered and not self._closed:
                    self._idle.append(connection)
                else:
                    connection.close()

    def _take(self) -> _Connection | None:
        """None where enough are in use."""
        with self._lock:
            if self._closed:
                raise ConnectionError("the client is closed")
            if len(self._busy) >= CONNECTIONS_MAX:
                return None
            connection = self._idle.pop() if self._idle else _Connection(self._address)
            self._busy.add(connection)
            return connection


class _Connection:
    def __init__(self, address: str) -> None:
        self._socket = connected(address)

    def exchange(self, frame: bytes, end: float, read: Callable[[bytes], Any]) -> tuple[bytes, Any]:
        """The answer and, where it came early, what `read` made of it. Raises TimeoutError, OSError."""
        self._wait_until(end)
        self._socket.sendall(frame)
        frames, early = wire.Frames(), None
        while True:
            self._wait_until(end)
            data = self._socket.recv(RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("the peer hung up")
            try:
                answer = frames.feed(data)
            except InvalidInput as error:
                raise ConnectionError(error.message) from error
            if answer is not None:
                return answer, early
            if early is None and (coming := frames.early()) is not None:
                early = wire.read_answer(coming, read)

    def _wait_until(self, end: float) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def hang_up(self) -> None:
        """From another thread: wakes the one that waits."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is down already

    def close(self) -> None:
        self._socket.close()
