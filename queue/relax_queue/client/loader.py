"""The rows of a step, chunk by chunk, for one data-parallel rank; the next chunk is fetched while one is trained.

A read changes nothing and a plan is logged before anyone sees it. So a loader that is opened again at a step, by a
restarted rank or after a restart of the queue, delivers the same chunks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import DeadlineExceeded, RelaxError
from relax_queue.client.plans import PlannedChunk, StepClosing
from relax_queue.client.threads import QueueClient
from relax_queue.rows.column_block import Column
from relax_queue.rows.row_keys import RowKeys, join_keys

READ_SECONDS = 15.0
"""How long one call waits for the fields of other roles; long enough for gigabytes."""
WAIT_SECONDS = 2.0
"""How long one call waits for a plan; then the call is repeated, unless the loader was opened at another step since."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """`own`: fields of the rank's rows. `shared`: fields of all rows of a chunk, whichever rank trains them."""

    consumer: str
    dp_rank: int
    own: tuple[str, ...]
    shared: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedChunk:
    """A chunk with its columns. Arrays are read-only; on the queue's host they are views of its memory until
    dropped."""

    plan: pb.PlanKey
    chunk: PlannedChunk
    rows: RowKeys
    columns: dict[str, Column]
    """`own` over `rows`, sample- and group-scoped values by first appearance; empty without rows"""
    everyone: RowKeys
    shared: dict[str, Column]
    """`shared` over `everyone`"""


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The step has closed, or (None) the run has no such step."""

    plan: pb.PlanKey
    close: StepClosing | None


Loaded = LoadedChunk | StepEnd


class StreamingLoader:
    """Opened at a step, it delivers the step's chunks in order and then its end. One thread consumes."""

    def __init__(self, client: QueueClient, wanted: Wanted, term: Callable[[], int]) -> None:
        self._client = client
        self._wanted = wanted
        self._term = term
        self._stream: _Stream | None = None

    def open(self, lineage: int, step: int, generation: int = 0) -> None:
        """Begin with the first chunk of a step; does nothing if the loader is at that step already.

        `generation` 0 takes the plan that currently counts. May be called before the step can be planned: the first
        chunk is fetched as soon as it exists.
        """
        stream = self._stream
        if stream is not None and stream.stands_at(lineage, step, generation):
            return
        if stream is not None:
            stream.stop()
        self._stream = _Stream(self._client, self._wanted, self._term(), lineage, step, generation)

    def next(self, wait_seconds: float) -> Loaded:
        """The next chunk or the end of the step.

        Raises DeadlineExceeded, naming what is missing, and what the queue refuses (PlanLost: open the step again).
        """
        if self._stream is None:
            raise ValueError("the loader is opened at a step first")
        return self._stream.next(wait_seconds)

    def close(self) -> None:
        """Stop fetching; what was delivered stays valid as long as it is referred to."""
        if self._stream is not None:
            self._stream.stop()
            self._stream = None


class _Stream:
    """One step under one generation: a thread that fetches at most one chunk ahead."""

    def __init__(
        self, client: QueueClient, wanted: Wanted, term: int, lineage: int, step: int, generation: int
    ) -> None:
        self._client, self._wanted = client, wanted
        self._term, self._lineage, self._step, self._generation = term, lineage, step, generation
        self._delivered = 0
        self._fetched: queue.Queue[Loaded | RelaxError] = queue.Queue()
        self._room = threading.Semaphore(1)
        self._stopped = threading.Event()
        self._missing = f"the plan of step {step}"
        threading.Thread(target=self._fetch_all, name=f"loader-{step}", daemon=True).start()

    def stands_at(self, lineage: int, step: int, generation: int) -> bool:
        here = (self._lineage, self._step) == (lineage, step) and generation in (0, self._generation)
        return here and not self._delivered and not self._stopped.is_set()

    def next(self, wait_seconds: float) -> Loaded:
        try:
            found = self._fetched.get(timeout=wait_seconds)
        except queue.Empty:
            missing = self._missing
            raise DeadlineExceeded(f"waited {wait_seconds:.1f} s for {missing}", details={"missing": missing}) from None
        self._delivered += 1
        if isinstance(found, RelaxError):
            self.stop()
            raise found
        self._room.release()
        return found

    def stop(self) -> None:
        self._stopped.set()
        self._room.release()

    def _fetch_all(self) -> None:
        index = 0
        while True:
            self._room.acquire()
            if self._stopped.is_set():
                return
            try:
                found = self._fetch(index)
            except RelaxError as error:
                self._fetched.put(error)
                return
            if found is None:
                return
            self._fetched.put(found)
            if isinstance(found, StepEnd):
                return
            index += 1

    def _fetch(self, index: int) -> Loaded | None:
        """Chunk `index` with its rows; None if it is no longer wanted."""
        while not self._stopped.is_set():
            try:
                answer = self._client.get_plan(
                    self._wanted.consumer, self._term, self._lineage, self._step, index, self._generation, WAIT_SECONDS
                )
                self._generation = answer.plan.generation or self._generation
                if answer.chunk is None:
                    return StepEnd(answer.plan, answer.close)
                return self._read(answer.plan, answer.chunk)
            except DeadlineExceeded as error:
                self._missing = error.missing  # a plan, or a field that another role has not written yet
        return None

    def _read(self, plan: pb.PlanKey, chunk: PlannedChunk) -> LoadedChunk:
        wanted = self._wanted
        everyone = join_keys(batch.rows for rank in chunk.ranks for batch in rank)
        rows = join_keys(batch.rows for batch in chunk.ranks[wanted.dp_rank])
        if rows == everyone:
            both = self._client.read_rows(plan, rows, tuple(dict.fromkeys((*wanted.own, *wanted.shared))), READ_SECONDS)
            return LoadedChunk(plan, chunk, rows, _only(both, wanted.own), everyone, _only(both, wanted.shared))
        shared = self._client.read_rows(plan, everyone, wanted.shared, READ_SECONDS) if wanted.shared else {}
        columns = self._client.read_rows(plan, rows, wanted.own, READ_SECONDS) if rows and wanted.own else {}
        return LoadedChunk(plan, chunk, rows, columns, everyone, shared)


def _only(columns: dict[str, Column], names: Sequence[str]) -> dict[str, Column]:
    return {name: columns[name] for name in names}
