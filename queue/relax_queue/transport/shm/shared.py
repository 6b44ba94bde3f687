"""A client's part of shared memory: its session, the slabs that it may write, the views that it reads. No calls."""

import threading
import time
from collections.abc import Iterable

import numpy as np

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import SlabGone
from relax_queue.rows.column_block import Column, Layout, decode, digest_of, join, size_of
from relax_queue.transport.shm.mapping import Closed, Mapping

SPARE_SECONDS = 10.0
"""A slab is not used for writing when its lease ends within this time."""
SPARE_BYTES = 16 << 20
"""Larger slabs are requested only when needed: one more call costs less than that much idle memory."""
SPARE_SLABS = 4
"""Granted slabs that are kept for later puts."""


Spare = tuple[pb.SlabKey, float]
"""A slab and when it is too late to begin writing it, in time.monotonic() seconds"""


class SharedMemory:
    """Thread-safe."""

    def __init__(self, mapping: Mapping, session: int) -> None:
        self.mapping = mapping
        self.session = session
        self._closed = Closed()
        self._lock = threading.Lock()
        self._spare: list[Spare] = []
        self._unused: list[pb.SlabKey] = []

    # Writing

    def granted(self, grant: pb.SlabGrant) -> Spare:
        return grant.slab, time.monotonic() + grant.write_seconds - SPARE_SECONDS

    def _keep(self, slab: pb.SlabKey, end: float) -> None:
        with self._lock:
            self._spare.append((slab, end))
            while len(self._spare) > SPARE_SLABS:
                self._unused.append(self._spare.pop(0)[0])

    def take(self, n_bytes: int) -> Spare | None:
        """The smallest slab in stock that holds that many bytes."""
        with self._lock:
            now = time.monotonic()
            self._unused += [slab for slab, end in self._spare if end < now]
            self._spare = [(slab, end) for slab, end in self._spare if end >= now]
            fitting = [entry for entry in self._spare if entry[0].size_bytes >= n_bytes]
            if not fitting:
                return None
            entry = min(fitting, key=lambda e: e[0].size_bytes)
            self._spare.remove(entry)
            return entry

    def put_request(self, header: pb.PutHeader, block: Layout, spare: Spare) -> pb.PutGroupsRequest:
        """Assemble a block in a slab that was taken; returns the message that tells the broker."""
        digest = block.write(self.mapping.writable(spare[0], block.size))
        next_bytes = block.size + block.size // 16  # groups of a run are of similar size
        return pb.PutGroupsRequest(
            puts=[pb.GroupPut(header=header, slab=spare[0], digest=digest)],
            session=self.session,
            unused=self.unused(),
            next_slab_bytes=next_bytes if next_bytes <= SPARE_BYTES else 0,
        )

    def settle(self, spare: Spare, response: pb.PutGroupsResponse) -> pb.PutResult:
        """The disposition of a put's group; a slab that the broker did not take is kept."""
        if response.HasField("next"):
            self._keep(*self.granted(response.next))
        result = response.results[0]
        if not result.slab_taken:
            if result.refusal.reason == SlabGone.REASON:
                self.forget(spare[0])
            else:
                self._keep(*spare)
        return result

    def forget(self, *slabs: pb.SlabKey) -> None:
        """Give slabs back with the next call: after a failed one it is unknown whether the broker has taken them."""
        with self._lock:
            self._unused += slabs

    def unused(self) -> list[pb.SlabKey]:
        """Slabs to give back with the next call."""
        with self._lock:
            unused, self._unused = self._unused, []
            return unused

    # Reading

    def closed_views(self) -> bytes:
        return self._closed.drain()

    def not_told(self, closed_views: bytes) -> None:
        """The broker did not get them: send them with the next call."""
        for offset in np.frombuffer(closed_views, "<u8").tolist():
            self._closed.note(offset)

    def columns(self, placed: pb.PlacedRows) -> dict[str, Column]:
        """Columns over the rows: read-only views if the rows are in one block, else one copy."""
        blocks = []
        for slab in placed.slabs:
            view = self.mapping.readable(slab, self._closed.note)
            blocks.append(decode(view[: size_of(view)], digest=digest_of(view)))
        found: dict[str, Column] = {}
        for part in placed.fields:
            spans = np.frombuffer(part.spans, "<i4").reshape(-1, 3).tolist()
            for name in part.fields:
                column = join([(blocks[i][name], start, end) for i, start, end in spans])
                if column is not None:
                    found[name] = column
        return found

    def check(self, slabs: Iterable[pb.SlabKey]) -> None:
        """Raises DataLoss if a slab has been reused since it was read."""
        for slab in slabs:
            self.mapping.check(slab)
