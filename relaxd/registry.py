"""Registered daemons: terms by incarnation, heartbeats by relaxd's monotonic clock.

| event | effect |
|---|---|
| Register, new incarnation | term + 1, fsynced before the answer |
| Register, known incarnation | the same term (another rank, or a repeat) |
| Heartbeat, newest term | its time to live begins again |
| Heartbeat, older term | STALE_TERM |
| no heartbeat for a time to live | the daemon is not alive; the launcher replaces it |
| relaxd restarts, or was itself frozen | every daemon that was alive gets a new time to live |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from relax.common.v1 import common_pb2
from relax.controller.v1 import controller_pb2
from relax_common.errors import NotFound
from relax_common.rpc.registration import BEATS_PER_TTL
from relax_common.terms import Terms
from relaxd.store import NewEvent, Store, Write, put_daemon, put_term

_BUSY_SECONDS = 1.0
"""A check that is late by less than this means a busy host, not a frozen relaxd."""

Key = tuple[str, int]
"""(instance, rank)"""


class Registry:
    def __init__(self, store: Store, ttl_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.ttl_seconds = ttl_seconds
        self._store = store
        self._clock = clock
        self._terms = Terms({instance: term for instance, (term, _) in store.terms.items()})
        self._incarnations = {instance: incarnation for instance, (_, incarnation) in store.terms.items()}
        self._granting = asyncio.Lock()
        self.daemons: dict[Key, controller_pb2.Daemon] = {
            (daemon.identity.instance, daemon.rank): daemon for daemon in store.daemons
        }
        self._draining: set[tuple[str, int]] = set()
        now = clock()
        self._seen: dict[Key, float] = {key: now for key, daemon in self.daemons.items() if daemon.alive}
        self._looked = now

    async def grant(
        self, request: controller_pb2.RegisterRequest, run: str, event_of: Callable[[int], NewEvent]
    ) -> controller_pb2.Daemon:
        """The term of this incarnation. It takes effect only once it is on disk, together with the event."""
        # Shielded: if the caller goes away during the write, disk and memory must not diverge.
        return await asyncio.shield(asyncio.create_task(self._grant(request, run, event_of)))

    async def _grant(
        self, request: controller_pb2.RegisterRequest, run: str, event_of: Callable[[int], NewEvent]
    ) -> controller_pb2.Daemon:
        instance, incarnation = request.identity.instance, request.identity.incarnation
        # One at a time: the next term depends on the one before, which is not known until it is written.
        async with self._granting:
            term = self._terms.of(instance)
            writes: list[Write] = []
            if incarnation != self._incarnations.get(instance, ""):
                term += 1
                writes.append(put_term(instance, term, incarnation))
            daemon = controller_pb2.Daemon(
                identity=request.identity,
                address=request.address,
                metrics_address=request.metrics_address,
                rank=request.rank,
                term=term,
                alive=True,
                pid=request.pid,
                run=run,
            )
            await self._store.write(*writes, put_daemon(daemon), event=event_of(term))
            key = (instance, request.rank)
            self._terms.register(instance, term)
            self._incarnations[instance] = incarnation
            self.daemons[key] = daemon
            self._seen[key] = self._clock()
        return daemon

    def drain(self, instance: str) -> None:
        """Tell it to end in the answer to its next heartbeat; a later registration is not affected."""
        self._draining.add((instance, self._terms.of(instance)))

    def beating(self, instance: str) -> bool:
        """Whether one of its ranks was heard within three heartbeat intervals."""
        since = self._clock() - 3 * self.ttl_seconds / BEATS_PER_TTL
        return any(key[0] == instance and daemon.alive and self._seen.get(key, 0.0) > since
                   for key, daemon in self.daemons.items())  # fmt: skip

    def beat(self, request: controller_pb2.HeartbeatRequest) -> bool:
        """Whether the daemon is to end. Raises NotFound for an unknown daemon, StaleTerm for a replaced one."""
        key = (request.instance, request.rank)
        daemon = self.daemons.get(key)
        if daemon is None:
            raise NotFound(f"{request.instance} rank {request.rank} is not registered")
        self.check_term(request.instance, request.term)
        self._seen[key] = self._clock()
        daemon.alive = True
        daemon.waits_for = request.waits_for
        return (request.instance, request.term) in self._draining

    def check_term(self, instance: str, term: int) -> None:
        """Raises NotFound for an unknown daemon, StaleTerm for a replaced one."""
        if instance not in self._incarnations:
            raise NotFound(f"{instance} is not registered")
        self._terms.check(instance, term)

    def waits_told_after(self, moment: float) -> list[str]:
        """Who waits for what, from heartbeats after this time of the registry's clock.

        If the run has made progress since, an older heartbeat reports a wait that is over.
        """
        return [
            f"{daemon.identity.instance} waits for {daemon.waits_for}"
            for key, daemon in self.daemons.items()
            if daemon.alive and daemon.waits_for and self._seen.get(key, 0.0) >= moment
        ]

    def expire(self) -> list[controller_pb2.Daemon]:
        """Daemons that have been silent for their time to live; called every `look_seconds`.

        If relaxd itself was frozen, it has heard nobody, and heartbeats may still be waiting in its sockets: every
        daemon that was alive gets a new time to live.
        """
        now = self._clock()
        slept = now - self._looked > 2 * self.look_seconds + _BUSY_SECONDS
        self._looked = now
        if slept:
            self._seen = {key: now for key, daemon in self.daemons.items() if daemon.alive}
            return []
        expired = []
        for key, daemon in self.daemons.items():
            if daemon.alive and now - self._seen.get(key, now) > self.ttl_seconds:
                daemon.alive = False
                expired.append(daemon)
        return expired

    @property
    def look_seconds(self) -> float:
        """How often to call `expire`."""
        return self.ttl_seconds / 8

    def alive(self, role: common_pb2.Role, run: str = "") -> list[controller_pb2.Daemon]:
        """Alive daemons of a role; those that serve `run` or any."""
        return [d for d in self.daemons.values() if d.alive and d.identity.role == role and d.run in ("", run)]
