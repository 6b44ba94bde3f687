"""Registered daemons: terms by incarnation, leases by relaxd's monotonic clock.

| event | effect |
|---|---|
| Register, new incarnation | term + 1, fsynced before the answer |
| Register, known incarnation | the same term (another rank, or a repeat) |
| Heartbeat, newest term | lease extended |
| Heartbeat, older term | STALE_TERM |
| lease runs out | daemon is not alive; the launcher replaces it |
| relaxd restarts | every lease is extended once |
"""

from __future__ import annotations

import time
from collections.abc import Callable

from relax.common.v1 import common_pb2
from relax.controller.v1 import controller_pb2
from relax_common.errors import NotFound, StaleTerm
from relax_common.rpc.registration import BEATS_PER_TTL
from relaxd.store import Store, Write, put_daemon, put_term

Key = tuple[str, int]
"""(instance, rank)"""


class Registry:
    def __init__(self, store: Store, ttl_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.ttl_seconds = ttl_seconds
        self._clock = clock
        self._terms = store.terms
        self.daemons: dict[Key, controller_pb2.Daemon] = {
            (daemon.identity.instance, daemon.rank): daemon for daemon in store.daemons
        }
        self._draining: set[tuple[str, int]] = set()
        now = clock()
        self._seen: dict[Key, float] = {key: now for key, daemon in self.daemons.items() if daemon.alive}

    def grant(self, request: controller_pb2.RegisterRequest, run: str) -> tuple[controller_pb2.Daemon, list[Write]]:
        """Term for this incarnation and the writes that must be durable before the answer."""
        instance, incarnation = request.identity.instance, request.identity.incarnation
        term, known = self._terms.get(instance, (0, ""))
        writes: list[Write] = []
        if incarnation != known:
            term += 1
            self._terms[instance] = (term, incarnation)
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
        key = (instance, request.rank)
        self.daemons[key] = daemon
        self._seen[key] = self._clock()
        return daemon, [*writes, put_daemon(daemon)]

    def drain(self, instance: str) -> None:
        """Tell it to end, in the answer to its next heartbeat; a new registration is not meant."""
        self._draining.add((instance, self._terms.get(instance, (0, ""))[0]))

    def beating(self, instance: str) -> bool:
        """Whether a rank of it has been heard within three of its intervals."""
        since = self._clock() - 3 * self.ttl_seconds / BEATS_PER_TTL
        return any(key[0] == instance and daemon.alive and self._seen.get(key, 0.0) > since
                   for key, daemon in self.daemons.items())  # fmt: skip

    def beat(self, request: controller_pb2.HeartbeatRequest) -> bool:
        """Whether the daemon is to end. Raises NotFound for an unknown daemon, StaleTerm for a replaced one."""
        key = (request.instance, request.rank)
        daemon = self.daemons.get(key)
        if daemon is None:
            raise NotFound(f"{request.instance} rank {request.rank} is not registered")
        newest = self._terms[request.instance][0]
        if request.term < newest:
            raise StaleTerm(f"{request.instance}: term {request.term} is over, term {newest} has taken over; exit")
        self._seen[key] = self._clock()
        daemon.alive = True
        daemon.waits_for = request.waits_for
        return (request.instance, request.term) in self._draining

    def expire(self) -> list[controller_pb2.Daemon]:
        """Daemons whose lease ran out since the last call."""
        now = self._clock()
        expired = []
        for key, daemon in self.daemons.items():
            if daemon.alive and now - self._seen.get(key, now) > self.ttl_seconds:
                daemon.alive = False
                expired.append(daemon)
        return expired

    def alive(self, role: common_pb2.Role, run: str = "") -> list[controller_pb2.Daemon]:
        """Alive daemons of a role; those that serve `run` or any."""
        return [d for d in self.daemons.values() if d.alive and d.identity.role == role and d.run in ("", run)]
