"""The contract of a transport. `tests/support/transport_conformance.py` tests every transport against it.

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
    """The bytes cannot be fetched this way now; the next version may be."""


@dataclass(frozen=True)
class Offer:
    """Bytes that a client hands over. `place` tells dcs where they are; None: they follow as `chunks`, which is called
    again when the call is repeated. `owner` keeps them alive until the call has ended."""

    place: bytes | None
    chunks: Callable[[], Iterator[bytes]] = lambda: iter(())
    owner: object = None


class Source(Protocol):
    """A committed version at dcs, as a client sees it."""

    @property
    def entries(self) -> Sequence[dcs_pb2.Slice]:
        """Entries in the order of the stream."""

    @property
    def places(self) -> Sequence[bytes]:
        """What `place_of` returned for each memory; empty if dcs does not speak the transport."""

    @property
    def offsets(self) -> Sequence[dcs_pb2.MemoryOffset]:
        """For each entry, its memory and its offset in it; empty if `places` is."""

    def stream(self, offset: int) -> Iterator[bytes]:
        """The bytes of all entries one after the other, starting at a given byte. Raises Unavailable if the stream
        breaks."""

    def retry(self, call: Callable[[], None]) -> None:
        """Repeat a call until it raises no Unavailable, or its deadline passes."""


class Transport(Protocol):
    @property
    def name(self) -> str: ...

    def offer(self, parts: Sequence[Buffer]) -> Offer: ...

    async def take(self, place: bytes, chunks: AsyncIterator[bytes], size_bytes: int, what: str) -> SealedMemory:
        """Raises MemoryOutOfReach if dcs can never reach such a place (the client then uses the next transport), and
        InvalidInput if the size received is not `size_bytes`."""

    def place_of(self, memory: SealedMemory) -> bytes | None:
        """Returns None if the memory cannot be reached this way."""

    def fetch(self, source: Source) -> list[memoryview]:
        """Returns the bytes of each entry; writing to them changes them for this process alone. Raises MemoryOutOfReach
        or NotNow."""
