"""Waiting without polling: a call sleeps until the run changes, and its deadline names what is missing (I5)."""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from relax_common.errors import DeadlineExceeded
from relax_queue.metrics import WAIT_SECONDS, WAITING, WAKE_SECONDS

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A wait in progress, for people."""

    call: str
    who: str
    what: Callable[[], str]
    since: float


class Waits:
    """All waits of one run. `changed` wakes them; each looks again and sleeps on if it still has to."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._change: asyncio.Future[float] | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, Waiting] = {}

    def changed(self) -> None:
        if self._change is not None and not self._change.done():
            self._change.set_result(time.perf_counter())
        self._change = None

    def in_progress(self) -> list[Waiting]:
        return list(self._waiting.values())

    async def until(
        self,
        call: str,
        who: str,
        ready: Callable[[], T | None],
        what: Callable[[], str],
        end: float,
        missing: Callable[[], list[tuple[str, str]]] | None = None,
    ) -> T:
        """The first value of `ready` that is not None. `end` is in time.monotonic() seconds.

        missing: (consumer, field) pairs that the seconds of the wait are counted under.
        """
        value = ready()
        if value is not None:
            return value
        number, since = next(self._numbers), time.monotonic()
        self._waiting[number] = Waiting(call, who, what, since)
        pairs = missing() if missing else []
        gauge = WAITING.labels(self._run, call)
        gauge.inc()
        try:
            while True:
                changed_at = await self._next_change(end)
                value = ready()
                if value is not None:
                    if changed_at is not None:
                        WAKE_SECONDS.observe(time.perf_counter() - changed_at)
                    return value
                if changed_at is None:
                    waited = time.monotonic() - since
                    raise DeadlineExceeded(f"{call} of {who} waited {waited:.1f} s for {what()}")
        finally:
            for consumer, field in pairs:
                WAIT_SECONDS.labels(self._run, consumer, field).inc(time.monotonic() - since)
            gauge.dec()
            del self._waiting[number]

    async def _next_change(self, end: float) -> float | None:
        """When the run changed; None once `end` has passed."""
        if self._change is None or self._change.done():
            self._change = asyncio.get_running_loop().create_future()
        change = self._change
        await asyncio.wait({change}, timeout=max(0.0, end - time.monotonic()))
        return change.result() if change.done() else None
