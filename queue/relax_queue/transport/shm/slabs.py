"""Who holds a slab: a writer that fills it, the state whose rows are in it, readers with views. Pure bookkeeping.

A slab goes back to the arena when its last holder lets go. Writers and readers are processes of this host. They keep
what they hold until they release it or the process has ended. A deadline alone never takes it away, because a process
that was merely slow would then write to memory that belongs to others.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from relax_common.errors import SlabGone, UnknownSession
from relax_queue.transport.shm.arena import Arena, Slab

WRITE_SECONDS = 60.0
"""A slab must be put this long after it was granted; after that its writer can only give it back."""


@dataclass(slots=True)
class Session:
    """What one process holds: slabs to write by offset with their deadlines, counts of views by offset."""

    id: int
    pid: int
    writes: dict[int, tuple[Slab, float]] = field(default_factory=dict)
    views: dict[int, int] = field(default_factory=dict)


class Slabs:
    """All slabs of an arena that are in use."""

    def __init__(self, arena: Arena, clock: Callable[[], float] = time.monotonic) -> None:
        self.arena = arena
        self._clock = clock
        self._holders: dict[int, int] = {}
        self._slabs: dict[int, Slab] = {}
        self._sessions: dict[int, Session] = {}
        self._next_session = 1

    # Sessions

    def begin(self, pid: int) -> Session:
        session = Session(self._next_session, pid)
        self._next_session += 1
        self._sessions[session.id] = session
        return session

    def session(self, number: int) -> Session:
        found = self._sessions.get(number)
        if found is None:
            raise UnknownSession(f"session {number} of shared memory is not known: attach again")
        return found

    def end(self, number: int) -> None:
        """Release everything that a session holds; a repeat changes nothing."""
        session = self._sessions.pop(number, None)
        if session is None:
            return
        held = (*session.writes, *session.views)
        session.writes.clear()
        session.views.clear()
        for offset in held:
            self._let_go(offset)

    def end_process(self, pid: int) -> None:
        for session in [s for s in self._sessions.values() if s.pid == pid]:
            self.end(session.id)

    # Writers

    def grant(self, session: Session, n_bytes: int) -> tuple[Slab, float] | None:
        """A slab to write and the seconds it may take; None if the arena is full."""
        slab = self.arena.take(n_bytes)
        if slab is None:
            return None
        self._hold(slab)
        session.writes[slab.offset] = slab, self._clock() + WRITE_SECONDS
        return slab, WRITE_SECONDS

    def written(self, session: Session, offset: int, generation: int, n_bytes: int) -> memoryview:
        """The bytes that a writer says it has written. Raises SlabGone, also for more than was granted."""
        slab, deadline = session.writes.get(offset, (None, 0.0))
        if slab is None or slab.generation != generation:
            raise SlabGone(f"slab {offset}/{generation} is not granted to session {session.id}")
        if self._clock() > deadline:
            raise SlabGone(f"the grant of slab {offset}/{generation} has run out")
        if n_bytes > slab.size:
            raise SlabGone(f"slab {offset}/{generation} has {slab.size} bytes, not {n_bytes}")
        return self.arena.view(slab)[:n_bytes]

    def adopt(self, session: Session, offset: int, n_bytes: int) -> Slab:
        """Pass the slab from the writer to the state; bytes that the writer did not use are freed."""
        slab, _ = session.writes.pop(offset)
        self._slabs[offset] = self.arena.shrink(slab, n_bytes)
        return self._slabs[offset]

    def drop(self, session: Session, slabs: Iterable[tuple[int, int]]) -> None:
        """A writer gives back (offset, generation) unused."""
        for offset, generation in slabs:
            slab, _ = session.writes.get(offset, (None, 0.0))
            if slab is not None and slab.generation == generation:
                del session.writes[offset]
                self._let_go(offset)

    # The broker itself

    def store(self, n_bytes: int) -> Slab | None:
        """A slab that the broker fills; it holds it until `release`."""
        slab = self.arena.take(n_bytes)
        if slab is not None:
            self._hold(slab)
        return slab

    def pin(self, slab: Slab) -> None:
        """The broker reads a slab that is held; `release` it afterwards."""
        self._hold(slab)

    def release(self, slab: Slab) -> None:
        """The broker lets go of a slab that it stored or pinned, once for each."""
        self._let_go(slab.offset)

    # Readers

    def show(self, session: Session, slab: Slab) -> None:
        """One more view of a slab that is held."""
        session.views[slab.offset] = session.views.get(slab.offset, 0) + 1
        if session.views[slab.offset] == 1:
            self._hold(slab)

    def close_views(self, session: Session, offsets: Iterable[int]) -> None:
        """One view of each of these slabs is gone."""
        for offset in offsets:
            left = session.views.get(offset, 0) - 1
            if left > 0:
                session.views[offset] = left
            elif left == 0:
                del session.views[offset]
                self._let_go(offset)

    def _hold(self, slab: Slab) -> None:
        self._slabs[slab.offset] = slab
        self._holders[slab.offset] = self._holders.get(slab.offset, 0) + 1

    def _let_go(self, offset: int) -> None:
        self._holders[offset] -= 1
        if not self._holders[offset]:
            del self._holders[offset]
            self.arena.give_back(self._slabs.pop(offset))

    @property
    def n_sessions(self) -> int:
        return len(self._sessions)
