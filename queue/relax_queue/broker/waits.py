"""Waiting without polling: a call sleeps until the run changes, and its deadline names what is missing (I5)."""

import asyncio
import itertools
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol, TypeVar

from relax_common.errors import DeadlineExceeded, RelaxError
from relax_common.rpc.channels import DEFAULT_DEADLINE_SECONDS
from relax_queue.broker.metrics import WAIT_SECONDS, WAITING, WAKE_SECONDS

T = TypeVar("T")


class HasDeadline(Protocol):
    def time_remaining(self) -> float | None: ...


def wait_end(context: HasDeadline) -> float:
    """End of a wait in time.monotonic() seconds: a little before the caller's deadline, so that it gets the reason."""
    left = context.time_remaining()
    if left is None:
        left = DEFAULT_DEADLINE_SECONDS
    return time.monotonic() + max(0.0, left - min(0.25, 0.25 * left))


@dataclass(slots=True)
class Waiting:
    """A wait in progress. `over` is set when it should check again."""

    call: str
    who: str
    what: Callable[[], str]
    since: float
    ready: Callable[[], object]
    over: asyncio.Future[float]
    expired: bool = False

    def wake(self, changed_at: float) -> None:
        if not self.over.done():
            self.over.set_result(changed_at)

    def expire(self) -> None:
        self.expired = True
        self.wake(time.perf_counter())


def _may_go_on(waiting: Waiting) -> bool:
    try:
        return waiting.ready() is not None
    except RelaxError:
        return True  # the wait itself checks again and raises it


class Waits:
    """All waits of one run. After a change each wait is checked once; only those that may go on are woken."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._changed_at: float | None = None
        self._numbers = itertools.count()
        self._waiting: dict[Hashable, dict[int, Waiting]] = {}
        """Waits for the same thing, under one key"""

    def changed(self) -> None:
        """Waits are checked once for all changes of one round of the event loop."""
        if self._waiting and self._changed_at is None:
            self._changed_at = time.perf_counter()
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        changed_at, self._changed_at = self._changed_at or time.perf_counter(), None
        for alike in list(self._waiting.values()):
            if _may_go_on(next(iter(alike.values()))):
                for waiting in alike.values():
                    waiting.wake(changed_at)

    def _forget(self, same: Hashable, number: int) -> None:
        alike = self._waiting[same]
        del alike[number]
        if not alike:
            del self._waiting[same]

    def in_progress(self) -> list[Waiting]:
        found = (entry for alike in self._waiting.values() for entry in alike.items())
        return [waiting for _, waiting in sorted(found, key=itemgetter(0))]

    async def until(
        self,
        call: str,
        who: str,
        ready: Callable[[], T | None],
        what: Callable[[], str],
        end: float,
        missing: Callable[[], list[tuple[str, str]]] | None = None,
        same: Hashable = None,
    ) -> T:
        """The first value of `ready` that is not None. `end` is in time.monotonic() seconds.

        missing: (consumer, field) pairs under which the seconds of the wait are counted. same: waits with the same
        value wait for the same thing, such as all ranks for a chunk; after a change one of them is checked for all.
        """
        value = ready()
        if value is not None:
            return value
        loop, number, since = asyncio.get_running_loop(), next(self._numbers), time.monotonic()
        waiting = Waiting(call, who, what, since, ready, loop.create_future())
        same = number if same is None else same
        self._waiting.setdefault(same, {})[number] = waiting
        timer = loop.call_later(max(0.0, end - since), waiting.expire)
        counters = [WAIT_SECONDS.labels(self._run, consumer, field) for consumer, field in missing()] if missing else []
        gauge = WAITING.labels(self._run, call)
        gauge.inc()
        try:
            while True:
                changed_at = await waiting.over
                value = ready()
                if value is not None:
                    WAKE_SECONDS.observe(time.perf_counter() - changed_at)
                    return value
                if waiting.expired:
                    waited = time.monotonic() - since
                    details = {"missing": what()}
                    raise DeadlineExceeded(
                        f"{call} of {who} waited {waited:.1f} s for {details['missing']}", details=details
                    )
                waiting.over = loop.create_future()
        finally:
            timer.cancel()
            for counter in counters:
                counter.inc(time.monotonic() - since)
            gauge.dec()
            self._forget(same, number)
