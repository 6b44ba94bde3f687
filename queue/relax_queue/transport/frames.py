"""Frames of payload streams as raw bytes: they are the wire form of their messages, made and read without copies.

A chunk frame is a message whose only field is `bytes chunk`: a tag, a length, the bytes. Building it by hand saves two
copies on each side; any other client may use the generated classes.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError

from relax_common.errors import DeadlineExceeded, InvalidInput
from relax_common.rpc.channels import CHUNK_BYTES

INLINE_BYTES = 64 << 10
"""Up to this size a message costs less than shared memory."""
REQUEST_CHUNK = 2
"""Number of the field `chunk` in requests: PutRequest, ReturnGroupRequest, WriteFieldRequest, PutBlobRequest."""
RESPONSE_CHUNK = 1
"""The same in ReadRowsResponse and GetBlobResponse."""
ACCEPTED = ("relax-header", "accepted")
"""Initial metadata with which the broker says that it takes the bytes after a header."""
STALLED_SECONDS = 60.0
"""A stream whose sender sends nothing for this long is given up."""
RAW_REQUESTS = ("Put", "ReturnGroup", "WriteField", "PutBlob")
RAW_RESPONSES = ("ReadRows", "GetBlob")


class _Message(Protocol):
    header: Any

    def WhichOneof(self, name: Any) -> Any: ...


M = TypeVar("M", bound=_Message)


def _prefix(field: int, size: int) -> bytes:
    out = bytearray([field << 3 | 2])
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out)


def frames(buffers: Iterable[bytes | bytearray | memoryview], field: int, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """All bytes of `buffers` in frames of `size` bytes (the last one shorter): one copy."""
    parts: list[bytes | memoryview] = []
    filled = 0
    for buffer in buffers:
        view = memoryview(buffer)
        while view:
            piece = view[: size - filled]
            parts.append(piece)
            filled += len(piece)
            view = view[len(piece) :]
            if filled == size:
                yield b"".join((_prefix(field, filled), *parts))
                parts, filled = [], 0
    if filled:
        yield b"".join((_prefix(field, filled), *parts))


def chunk_of(frame: bytes, field: int) -> memoryview | None:
    """The bytes in a chunk frame; None if it is another message."""
    size = shift = 0
    for at in range(1, min(6, len(frame))):
        size |= (frame[at] & 0x7F) << shift
        shift += 7
        if frame[at] < 0x80:
            return memoryview(frame)[at + 1 :] if (frame[0], at + 1 + size) == (field << 3 | 2, len(frame)) else None
    return None


async def read_raw_header(frames: AsyncIterator[bytes], message: type[M], what: str) -> Any:
    """The header in the first frame. Raises InvalidInput if the stream begins with bytes or is empty."""
    async for frame in frames:
        try:
            first = message.FromString(frame)  # type: ignore[attr-defined]
        except DecodeError as error:
            raise InvalidInput(f"{what}: the first frame is not a {message.__name__}") from error
        if first.WhichOneof("frame") != "header":
            break
        return first.header
    raise InvalidInput(f"{what}: the first frame must be the header")


async def read_raw_chunks(frames: AsyncIterator[bytes], size_bytes: int, what: str) -> AsyncIterator[memoryview]:
    """The pieces after the header. Raises InvalidInput if they are not exactly `size_bytes`.

    Raises DeadlineExceeded if the sender stops: otherwise it could make the broker hold the received bytes without end.
    """
    filled = 0
    async for frame in _in_time(frames, what):
        chunk = chunk_of(frame, REQUEST_CHUNK)
        if chunk is None:
            raise InvalidInput(f"{what}: a frame after {filled} bytes is not a chunk")
        filled += len(chunk)
        if filled > size_bytes:
            raise InvalidInput(f"{what}: more than the announced {size_bytes} bytes")
        yield chunk
    if filled != size_bytes:
        raise InvalidInput(f"{what}: {filled} of the announced {size_bytes} bytes arrived")


async def _in_time(frames: AsyncIterator[bytes], what: str) -> AsyncIterator[bytes]:
    while True:
        try:
            async with asyncio.timeout(STALLED_SECONDS):
                frame = await anext(frames, None)
        except TimeoutError:
            raise DeadlineExceeded(f"{what}: nothing arrived for {STALLED_SECONDS:.0f} s") from None
        if frame is None:
            return
        yield frame


class RawPayload:
    """A server to register at: methods that carry chunks get and give their frames as bytes."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Only the handlers by name are needed; the others that the stubs add would parse every frame."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        raw = {name: self._raw(name, handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, raw),))
        self._server.add_registered_method_handlers(service, raw)

    def _raw(self, name: str, handler: Any) -> Any:
        if name in RAW_REQUESTS:
            return handler._replace(request_deserializer=None)
        if name in RAW_RESPONSES:
            return handler._replace(response_serializer=None)
        return handler
