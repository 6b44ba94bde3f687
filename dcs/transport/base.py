"""The contract of a transport. `tests/support/transport_conformance.py` holds every transport against it.

A transport moves bytes in both directions, and its two halves meet here:

| direction | the client | dcs |
|---|---|---|
| push (slices, states) | `offer`: the call carries a place, or chunks | `take` into memory that nobody can change |
| pull (a version) | `fetch` from places and offsets, or from the stream | `place_of` each memory that holds it |

No transport checks hashes: the consumer of the bytes does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from relax.dcs.v1 import dcs_pb2
from relax_common.storage.sealed_memory import Buffer, SealedMemory


class NotNow(Exception):
    """The bytes cannot be had this way at the moment; the next version may be."""


@dataclass(frozen=True)
class Offer:
    """Bytes that a client hands over. `place` tells dcs where they lie; None: they follow as `chunks`, which can be
    called again for a repeated call. `owner` keeps them alive until the call has ended."""

    place: bytes | None
    chunks: Callable[[], Iterator[bytes]] = lambda: iter(())
    owner: object = None


class Source(Protocol):
    """A committed version at dcs, as a client sees it."""

    @property
    def entries(self) -> Sequence[dcs_pb2.Slice]:
        """In the order of the stream."""

    @property
    def places(self) -> Sequence[bytes]:
        """What `place_of` said of each memory; empty where dcs does not speak the transport."""

    @property
    def offsets(self) -> Sequence[dcs_pb2.MemoryOffset]:
        """Where in which memory each entry begins; empty where `places` is."""

    def stream(self, offset: int) -> Iterator[bytes]:
        """The bytes of all entries one after the other, from a byte on. Raises Unavailable where it breaks."""

    def retry(self, call: Callable[[], None]) -> None:
        """Repeat a call until it raises no Unavailable, or its deadline passes."""


class Transport(Protocol):
    @property
    def name(self) -> str: ...

    def offer(self, parts: Sequence[Buffer]) -> Offer: ...

    async def take(self, place: bytes, chunks: AsyncIterator[bytes], size_bytes: int, what: str) -> SealedMemory:
        """Raises MemoryOutOfReach where dcs can never reach such a place: the client then uses the next transport. And
        InvalidInput where other than `size_bytes` came."""

    def place_of(self, memory: SealedMemory) -> bytes | None:
        """None where memory cannot be reached this way."""

    def fetch(self, source: Source) -> list[memoryview]:
        """The bytes of each entry; to write to them changes them for this process alone. Raises MemoryOutOfReach or
        NotNow."""
