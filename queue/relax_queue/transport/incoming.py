"""A block that is being received: where its bytes are, and who owns them once its rows are stored."""

from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from relax_common.errors import BadBlock
from relax_queue.rows.column_block import NO_COLUMNS, BlockError, Digest, Table, digest_of
from relax_queue.rows.columns import decode_block
from relax_queue.transport.intake import Buffer, Landing
from relax_queue.transport.shm.arena import Slab
from relax_queue.transport.shm.slabs import Session, Slabs


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes in a slab that the state holds."""

    slabs: Slabs
    slab: Slab

    def release(self) -> None:
        self.slabs.release(self.slab)


@dataclass(slots=True)
class Incoming:
    """`digest` is that of the block; `checked`: the bytes are known to hash to it."""

    content: Buffer
    digest: int
    n_bytes: int
    checked: bool = False
    home: Stored | None = None
    landing: Landing | None = None
    taken: bool = field(default=False, init=False)

    def columns(self, what: str) -> Table:
        """Views of the content; a broken block is INVALID_ARGUMENT."""
        if not self.n_bytes:
            return NO_COLUMNS
        return decode_block(self.content, what, digest=self.digest if self.checked else None)

    def check(self) -> None:
        """Check, right before the rows are stored, that the bytes are still there; raises Precondition."""

    def take(self) -> Stored | None:
        """The rows are stored: from now on the state holds the bytes."""
        self.taken = True
        if self.landing is not None:
            self.landing.close()
        return self.home

    def close(self) -> None:
        """Give back bytes that were not stored."""
        if self.home is not None and not self.taken:
            self.home.release()


class IncomingSlab(Incoming):
    """Written by its sender into a slab that was granted to it. Memory does not lose bytes, so they are not hashed
    again."""

    def __init__(self, slabs: Slabs, session: Session, offset: int, generation: int, n_bytes: int, digest: int) -> None:
        super().__init__(b"", digest, n_bytes, checked=True)
        self._slabs, self._session, self._offset, self._generation = slabs, session, offset, generation

    def columns(self, what: str) -> Table:
        self.check()
        return super().columns(what)

    def check(self) -> None:
        # The put may have waited for a version; meanwhile its writer may have died or its time run out.
        self.content = self._slabs.written(self._session, self._offset, self._generation, self.n_bytes)

    def take(self) -> Stored:
        self.taken = True
        return Stored(self._slabs, self._slabs.adopt(self._session, self._offset, self.n_bytes))


def inline(content: bytes, what: str) -> Incoming:
    """Received within a message."""
    try:
        return Incoming(content, digest_of(content) if content else 0, len(content))
    except BlockError as error:
        raise BadBlock(f"{what}: {error}") from error


async def received(chunks: AsyncIterator[memoryview], size_bytes: int, slabs: Slabs, landing: Landing) -> Incoming:
    """Received as frames: copied into a slab if there is room, and hashed piece by piece."""
    digest = Digest()
    with ExitStack() as undo:
        undo.callback(lambda: slabs.release(landing.slab) if landing.slab is not None else None)
        async for chunk in chunks:
            landing.add(chunk)
            digest.update(chunk)
        undo.pop_all()
    home = Stored(slabs, landing.slab) if landing.slab is not None else None
    return Incoming(landing.content, digest.value(), size_bytes, checked=True, home=home, landing=landing)
