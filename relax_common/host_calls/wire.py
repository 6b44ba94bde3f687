"""What travels on a connection: one call at a time, each a frame there and a frame back; integers are little-endian.

request   bytes u32 | seconds left f64 | length of the method's name u8 | name | message
answer    bytes u32 | 0 u8 | message          or          bytes u32 | 1 u8 | google.rpc.Status

`bytes` counts what follows it. Whoever hangs up cancels the call that is in progress.
"""

from __future__ import annotations

import struct

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from relax_common.errors import CallFailed, InvalidInput, RelaxError, from_status, to_status

FRAME_BYTES_MAX = 64 << 20
"""As for gRPC's messages (relax_common.channels)."""
SIZE = struct.Struct("<I")
_REQUEST = struct.Struct("<IdB")
_ANSWER = struct.Struct("<IB")
_DONE, _REFUSED = 0, 1


def request_frame(name: bytes, message: bytes, seconds: float) -> bytes:
    head = _REQUEST.pack(_REQUEST.size - SIZE.size + len(name) + len(message), seconds, len(name))
    return b"".join((head, name, message))


def read_request(frame: bytes) -> tuple[bytes, float, bytes]:
    """Name, seconds left, message. Raises InvalidInput."""
    if len(frame) < _REQUEST.size:
        raise InvalidInput(f"a call of {len(frame)} bytes came, it has at least {_REQUEST.size}")
    _, seconds, length = _REQUEST.unpack_from(frame)
    begin = _REQUEST.size + length
    if begin > len(frame):
        raise InvalidInput(f"a call whose method has a name of {length} bytes came in {len(frame)} bytes")
    return frame[_REQUEST.size : begin], seconds, frame[begin:]


def answer_frame(message: bytes) -> bytes:
    return _ANSWER.pack(1 + len(message), _DONE) + message


def refusal_frame(error: RelaxError) -> bytes:
    message: bytes = to_status(error).SerializeToString()
    return _ANSWER.pack(1 + len(message), _REFUSED) + message


def read_answer(frame: bytes) -> bytes:
    """The message; raises CallFailed with the error that the peer sent."""
    if frame[SIZE.size] == _DONE:
        return frame[_ANSWER.size :]
    try:
        status = status_pb2.Status.FromString(frame[_ANSWER.size :])
    except DecodeError as error:
        raise CallFailed(RelaxError("an answer came that is neither a message nor a status")) from error
    raise CallFailed(from_status(status))


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

    def _size(self, data: bytes | bytearray) -> int | None:
        if len(data) <= SIZE.size:
            return None
        size = SIZE.size + int(SIZE.unpack_from(data)[0])
        if not SIZE.size < size <= FRAME_BYTES_MAX:
            raise InvalidInput(f"a frame of {size} bytes was announced, at most {FRAME_BYTES_MAX} are taken")
        return size
