"""Memory that both sides map: dcs and its client are processes of one host."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Sequence

from dcs.transport.base import NotNow, Offer, Source
from relax.common.v1 import common_pb2
from relax_common.errors import InvalidInput, MemoryOutOfReach
from relax_common.storage.sealed_memory import Buffer, Place, SealedMemory, open_sealed, sealed


class Sealed:
    name = "sealed"

    def offer(self, parts: Sequence[Buffer]) -> Offer:
        memory = sealed(parts)
        return Offer(_place_to_bytes(memory.place()), owner=memory)

    async def take(self, place: bytes, chunks: AsyncIterator[bytes], size_bytes: int, what: str) -> SealedMemory:
        try:
            memory = await asyncio.to_thread(open_sealed, _place_from_bytes(place))
        except OSError as error:
            raise MemoryOutOfReach(f"{what}: dcs cannot map the bytes: {error}") from error
        if memory.size_bytes != size_bytes:
            raise InvalidInput(f"{what}: {size_bytes} bytes were announced, the memory has {memory.size_bytes}")
        return memory

    def place_of(self, memory: SealedMemory) -> bytes | None:
        return _place_to_bytes(memory.place())

    def fetch(self, source: Source) -> list[memoryview]:
        if not source.places:
            raise MemoryOutOfReach("dcs offers no memory to map")
        try:
            memories = [open_sealed(_place_from_bytes(place)) for place in source.places]
        except OSError as error:
            if error.errno == errno.ENOENT:  # dropped since it was listed; the next version may be reachable
                raise NotNow(str(error)) from error
            raise MemoryOutOfReach(str(error)) from error
        return [
            memories[at.memory].private[at.offset : at.offset + entry.size_bytes]
            for entry, at in zip(source.entries, source.offsets, strict=True)
        ]


def _place_to_bytes(place: Place) -> bytes:
    message = common_pb2.MemoryPlace(host=place.host, pid=place.pid, fd=place.fd, size_bytes=place.size_bytes)
    return message.SerializeToString()


def _place_from_bytes(data: bytes) -> Place:
    message = common_pb2.MemoryPlace.FromString(data)
    return Place(message.host, message.pid, message.fd, message.size_bytes)
