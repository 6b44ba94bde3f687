"""Bytes sent in the calls themselves: works between any two hosts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from dcs.transport.base import Offer, Source
from relax_common.errors import DataLoss, InvalidInput
from relax_common.rpc.calls import chunks
from relax_common.rpc.channels import CHUNK_BYTES
from relax_common.storage.sealed_memory import Buffer, MemoryWriter, SealedMemory


class Stream:
    name = "stream"

    def offer(self, parts: Sequence[Buffer]) -> Offer:
        return Offer(None, lambda: joined_chunks(parts))

    async def take(self, place: bytes, chunks: AsyncIterator[bytes], size_bytes: int, what: str) -> SealedMemory:
        memory = MemoryWriter()
        async for chunk in chunks:
            if memory.size_bytes + len(chunk) > size_bytes:
                raise InvalidInput(f"{what}: more than the announced {size_bytes} bytes")
            memory.write(chunk)
        if memory.size_bytes != size_bytes:
            raise InvalidInput(f"{what}: {memory.size_bytes} of the announced {size_bytes} bytes arrived")
        return memory.sealed()

    def place_of(self, memory: SealedMemory) -> bytes | None:
        return None

    def fetch(self, source: Source) -> list[memoryview]:
        """A stream that breaks goes on at the byte where it broke."""
        received = bytearray()

        def read() -> None:
            for chunk in source.stream(len(received)):
                received.extend(chunk)

        source.retry(read)
        total = sum(entry.size_bytes for entry in source.entries)
        if total != len(received):
            raise DataLoss(f"{len(received)} of {total} bytes arrived")
        view, parts, start = memoryview(received), [], 0
        for entry in source.entries:
            parts.append(view[start : start + entry.size_bytes])
            start += entry.size_bytes
        return parts


def joined_chunks(parts: Iterable[Buffer]) -> Iterator[bytes]:
    """The concatenation of many small parts in frames of at most CHUNK_BYTES."""
    pending: list[bytes] = []
    size = 0
    for part in parts:
        for piece in chunks(part):
            if size + len(piece) > CHUNK_BYTES:
                yield b"".join(pending)
                pending, size = [], 0
            pending.append(piece)
            size += len(piece)
    if pending:
        yield b"".join(pending)
