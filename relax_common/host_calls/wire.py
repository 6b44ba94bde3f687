"""What travels on a connection: one call at a time, each a frame there and a frame back; integers are little-endian.

request   bytes u32 | seconds left f64 | length of the method's name u8 | name | message
answer    bytes u32 | 0 u8 | message          or          bytes u32 | 1 u8 | google.rpc.Status          or
          bytes u32 | 2 u8 | message | 0 u8

`bytes` counts what follows it. Whoever hangs up cancels the call that is in progress. The last form is for an answer
that becomes true while it travels: its last byte is sent once it is, and a server that cannot stand by it hangs up.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from relax_common.errors import (
    CallFailed,
    DeadlineExceeded,
    Exhausted,
    InvalidInput,
    RelaxError,
    Unavailable,
    from_status,
    to_status,
)

FRAME_BYTES_MAX = 64 << 20
"""As for gRPC's messages (relax_common.rpc.channels)."""
SECONDS_MAX = 1e8
"""Longer calls are none that anybody waits for: the field is damaged."""
SIZE = struct.Struct("<I")
_REQUEST = struct.Struct("<IdB")
_ANSWER = struct.Struct("<IB")
_DONE, _REFUSED, _EARLY = 0, 1, 2
STANDS = b"\0"
"""The last byte of an early answer."""


def _body_bytes(head: struct.Struct, n_bytes: int) -> int:
    """What a frame announces. Raises Exhausted where it would be too long."""
    if head.size + n_bytes > FRAME_BYTES_MAX:
        raise Exhausted(f"a message of {n_bytes} bytes was to be sent, at most {FRAME_BYTES_MAX} travel at once")
    return head.size - SIZE.size + n_bytes


def request_frame(name: bytes, message: bytes, seconds: float) -> bytes:
    """Raises Exhausted."""
    head = _REQUEST.pack(_body_bytes(_REQUEST, len(name) + len(message)), seconds, len(name))
    return b"".join((head, name, message))


def read_request(frame: bytes) -> tuple[bytes, float, bytes]:
    """Name, seconds left, message. Raises InvalidInput."""
    if len(frame) < _REQUEST.size:
        raise InvalidInput(f"a call of {len(frame)} bytes came, it has at least {_REQUEST.size}")
    _, seconds, length = _REQUEST.unpack_from(frame)
    if not 0 <= seconds <= SECONDS_MAX:  # also nan
        raise InvalidInput(f"a call came that may take {seconds} s")
    begin = _REQUEST.size + length
    if begin > len(frame):
        raise InvalidInput(f"a call whose method has a name of {length} bytes came in {len(frame)} bytes")
    return frame[_REQUEST.size : begin], seconds, frame[begin:]


def answer_frame(message: bytes) -> bytes:
    """Raises Exhausted."""
    return _ANSWER.pack(_body_bytes(_ANSWER, len(message)), _DONE) + message


def early_frame(message: bytes) -> bytes:
    """All but the last byte. Raises Exhausted."""
    return _ANSWER.pack(_body_bytes(_ANSWER, len(message) + len(STANDS)), _EARLY) + message


def refusal_frame(error: RelaxError) -> bytes:
    message: bytes = to_status(error).SerializeToString()
    return _ANSWER.pack(1 + len(message), _REFUSED) + message


def read_answer(frame: bytes, parse: Callable[[bytes], Any]) -> Any:
    """What `parse` makes of the message; raises the error that the peer sent."""
    try:
        kind = frame[SIZE.size]
        if kind == _DONE:
            return parse(frame[_ANSWER.size :])
        if kind == _EARLY:
            return parse(frame[_ANSWER.size : -len(STANDS)])
        error = from_status(status_pb2.Status.FromString(frame[_ANSWER.size :]))
    except DecodeError as broken:
        raise RelaxError("an answer came that is neither a message nor a status") from broken
    raise error


def failure(name: bytes, seconds: float, error: RelaxError | OSError) -> CallFailed:
    """What a caller is told."""
    if isinstance(error, RelaxError):
        return CallFailed(error)
    if isinstance(error, TimeoutError):
        return CallFailed(DeadlineExceeded(f"{name.decode()} was not answered within {seconds:.1f} s"))
    return CallFailed(Unavailable(f"{name.decode()} over a socket of this host: {error}"))


class Frames:
    """Puts frames together from whatever pieces a socket gives."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> bytes | None:
        """The frame that is whole with these bytes. Raises InvalidInput where it is too long, or more than it came."""
        if self._received:
            self._received += data
            size = self._size(self._received)
            if size is None or len(self._received) < size:
                return None
            frame, self._received = bytes(self._received), bytearray()
        else:
            frame, size = data, self._size(data)
            if size is None or len(frame) < size:
                self._received += data
                return None
        if len(frame) > size:
            raise InvalidInput(f"{len(frame) - size} bytes came behind a frame whose answer was still to come")
        return frame

    def early(self) -> bytes | None:
        """The frame that only lacks the last byte of an early answer, with that byte."""
        size = self._size(self._received)
        if size is None or len(self._received) + len(STANDS) != size or self._received[SIZE.size] != _EARLY:
            return None
        return bytes(self._received) + STANDS

    def _size(self, data: bytes | bytearray) -> int | None:
        if len(data) < SIZE.size:
            return None
        size = SIZE.size + int(SIZE.unpack_from(data)[0])
        if not SIZE.size < size <= FRAME_BYTES_MAX:
            raise InvalidInput(f"a frame of {size} bytes was announced, at most {FRAME_BYTES_MAX} are taken")
        return size
