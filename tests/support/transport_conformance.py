"""What every dcs transport must do. Call `check_transport` from a test with the transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from dcs.transport import Offer, Transport
from relax.dcs.v1 import dcs_pb2
from relax_common.errors import InvalidInput, Unavailable
from relax_common.rpc.channels import CHUNK_BYTES
from relax_common.storage.sealed_memory import Buffer, SealedMemory, sealed

CASES: dict[str, list[Buffer]] = {
    "one part": [b"abc"],
    "nothing in between": [b"ab", b"", memoryview(b"c")],
    "many small parts": [bytes([n % 251]) * (n % 7) for n in range(1, 500)],
    "larger than a chunk": [bytes(CHUNK_BYTES + 3), bytearray(b"x" * 5)],
    "nothing at all": [],
}


def check_transport(transport: Transport) -> None:
    """Bytes arrive unchanged in both directions, and what is wrong is refused."""
    for parts in CASES.values():
        _push(transport, parts)
        _pull(transport, parts)
    _refuse_other_sizes(transport)
    _repeat_an_offer(transport)
    _write_without_being_seen(transport)


def take(transport: Transport, offer: Offer, size: int) -> SealedMemory:
    async def chunks() -> AsyncIterator[bytes]:
        for chunk in offer.chunks():
            assert len(chunk) <= CHUNK_BYTES
            yield chunk

    return asyncio.run(transport.take(offer.place or b"", chunks(), size, "a push"))


def _push(transport: Transport, parts: list[Buffer]) -> None:
    whole = b"".join(bytes(part) for part in parts)
    offer = transport.offer(parts)
    taken = take(transport, offer, len(whole))
    del offer
    assert bytes(taken.view) == whole
    assert taken.view.readonly


@dataclass
class HeldParts:
    """Implements dcs.transport.Source over memories that "dcs" holds; a stream breaks at `breaks_at` once."""

    transport: Transport
    memories: list[SealedMemory]
    breaks_at: int = -1
    calls: list[int] = field(default_factory=list)

    @property
    def entries(self) -> Sequence[dcs_pb2.Slice]:
        return [dcs_pb2.Slice(name=str(n), size_bytes=memory.size_bytes) for n, memory in enumerate(self.memories)]

    @property
    def places(self) -> Sequence[bytes]:
        places = [self.transport.place_of(memory) for memory in self.memories]
        return [place for place in places if place is not None]

    @property
    def offsets(self) -> Sequence[dcs_pb2.MemoryOffset]:
        return [dcs_pb2.MemoryOffset(memory=n) for n in range(len(self.places))]

    def stream(self, offset: int) -> Iterator[bytes]:
        self.calls.append(offset)
        whole = b"".join(bytes(memory.view) for memory in self.memories)
        for start in range(offset, len(whole), CHUNK_BYTES):
            if start <= self.breaks_at < start + CHUNK_BYTES and len(self.calls) == 1:
                yield whole[start : self.breaks_at]
                raise Unavailable("the stream has broken")
            yield whole[start : start + CHUNK_BYTES]

    def retry(self, call: Callable[[], None]) -> None:
        for _ in range(3):
            try:
                return call()
            except Unavailable:
                continue
        raise AssertionError("the call failed three times")


def _pull(transport: Transport, parts: list[Buffer]) -> None:
    memories = [sealed([part]) for part in parts if len(part)]
    if not memories:
        return  # a version has at least one slice
    size = sum(memory.size_bytes for memory in memories)
    for breaks_at in (-1, size // 2):
        source = HeldParts(transport, memories, breaks_at)
        fetched = transport.fetch(source)
        assert [bytes(data) for data in fetched] == [bytes(memory.view) for memory in memories]
        assert sum(source.calls) <= size // 2, "what has arrived is not sent again"


def _refuse_other_sizes(transport: Transport) -> None:
    for announced in (2, 4):
        with pytest.raises(InvalidInput):
            take(transport, transport.offer([b"abc"]), announced)


def _repeat_an_offer(transport: Transport) -> None:
    offer = transport.offer([b"ab", b"c"])
    assert bytes(take(transport, offer, 3).view) == bytes(take(transport, offer, 3).view) == b"abc"


def _write_without_being_seen(transport: Transport) -> None:
    memories = [sealed([b"abc"])]
    mine, others = (transport.fetch(HeldParts(transport, memories)) for _ in range(2))
    mine[0][0] = 0
    assert bytes(others[0]) == bytes(memories[0].view) == b"abc"
