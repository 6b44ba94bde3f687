"""What the servicers of all daemons share: the context of a call, and bytes in frames over a stream.

A stream of bytes is a header frame, then chunks of at most CHUNK_BYTES.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import grpc

from relax_common.errors import InvalidInput
from relax_common.rpc.channels import CHUNK_BYTES
from relax_common.storage.sealed_memory import Buffer


def chunks(payload: Buffer, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """The payload in pieces; gRPC accepts only `bytes`, so each piece is copied once."""
    view = memoryview(payload).cast("B") if isinstance(payload, memoryview) else memoryview(payload)
    for start in range(0, len(view), size):
        yield bytes(view[start : start + size])


async def read_header(frames: AsyncIterator[Any], what: str) -> Any:
    """The header in the first frame. Raises InvalidInput if the stream begins with bytes or is empty."""
    async for frame in frames:
        if frame.WhichOneof("frame") != "header":
            break
        return frame.header
    raise InvalidInput(f"{what}: the first frame must be the header")


async def frame_chunks(frames: AsyncIterator[Any], what: str) -> AsyncIterator[bytes]:
    """The bytes after the header, frame by frame."""
    async for frame in frames:
        if frame.WhichOneof("frame") != "chunk":
            raise InvalidInput(f"{what}: a second header in the stream")
        yield frame.chunk


class ServicerContext(Protocol):
    """The part of `grpc.aio.ServicerContext` that Relax uses, so that servicers are typed and tests can replace it."""

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline; None without one."""
        ...

    async def send_initial_metadata(self, initial_metadata: Sequence[tuple[str, str | bytes]]) -> None: ...

    def peer(self) -> str: ...

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]] | None: ...

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: object) -> NoReturn: ...
