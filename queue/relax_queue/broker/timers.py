"""The clocks of one run: leases that run out, and the closing deadline of a step."""

import asyncio
from collections.abc import Callable

from relax_queue.rules.group import Status
from relax_queue.rules.leases import expire
from relax_queue.rules.planning import closing_due
from relax_queue.rules.state import RunState
from relax_queue.rules.transaction import Decision

Lease = tuple[str, int]  # group, attempt


class Timers:
    """When a timer expires, `start` begins the transaction that follows from it.

    A timer may outlive its lease: the transaction then finds nothing to end.
    """

    def __init__(self, state: RunState, start: Callable[[Callable[[Decision], None]], None]) -> None:
        self._state = state
        self._start = start
        self._leases: dict[Lease, asyncio.TimerHandle] = {}
        self._begun: dict[Lease, float] = {}
        self._closing: tuple[tuple[int, int], asyncio.TimerHandle] | None = None

    def extend(self, lease: Lease) -> None:
        """(Re)start the time to live of a lease."""
        old = self._leases.pop(lease, None)
        if old is not None:
            old.cancel()
        loop = asyncio.get_running_loop()
        self._leases[lease] = loop.call_later(self._state.spec.lease_ttl_seconds, self._run_out, lease)
        self._begun.setdefault(lease, loop.time())

    def _run_out(self, lease: Lease) -> None:
        self._leases.pop(lease, None)
        self._start(lambda decision: expire(decision, *lease))

    def forget_ended(self) -> None:
        """Forget leases that are over. It examines all of them, so it is called seldom."""
        for lease in [lease for lease in self._leases if not self._is_held(lease)]:
            self._leases.pop(lease).cancel()
        for lease in [lease for lease in self._begun if lease not in self._leases]:
            del self._begun[lease]

    def _is_held(self, lease: Lease) -> bool:
        group, attempt = lease
        found = self._state.groups.get(group)
        return found is not None and found.status is Status.LEASED and found.attempts == attempt

    @property
    def has_leases(self) -> bool:
        return bool(self._leases)

    @property
    def oldest_lease_seconds(self) -> float:
        """Age of the oldest lease: since its grant, or since the restart of the broker if that was later."""
        now = asyncio.get_running_loop().time()
        return now - min((begun for lease, begun in self._begun.items() if self._is_held(lease)), default=now)

    def note_closing(self) -> None:
        """With closing `min_n` a step that has opened for planning gets its deadline."""
        spec, step = self._state.spec, self._state.head
        opened = self._state.lineage, step
        if spec.closing != "min_n" or step < 0 or (self._closing and self._closing[0] == opened):
            return
        if self._closing is not None:
            self._closing[1].cancel()
        loop = asyncio.get_running_loop()
        self._closing = opened, loop.call_later(spec.closing_deadline_seconds, self._closing_due, step)

    def _closing_due(self, step: int) -> None:
        self._start(lambda decision: closing_due(decision, step))

    def close(self) -> None:
        closing = [self._closing[1]] if self._closing else []
        for timer in (*self._leases.values(), *closing):
            timer.cancel()
