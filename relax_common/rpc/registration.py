"""How a daemon stays in contact with relaxd: it registers for a term and an assignment, then sends heartbeats.

relaxd is not on the data path: when it does not answer, a registered daemon continues to work and keeps calling. An old
incarnation is fenced by its term at the queue and dcs, not by the heartbeat.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from relax.common.v1 import common_pb2
from relax.controller.v1 import controller_pb2, controller_pb2_grpc
from relax_common.errors import NotFound, ProtocolMismatch, StaleTerm, from_rpc
from relax_common.process.config import DaemonConfig
from relax_common.process.telemetry import SERVES_RUN, get_logger
from relax_common.recipe import Recipe, parse_recipe
from relax_common.rpc.channels import acall_with_retry, aio_channel

REGISTER_DEADLINE_SECONDS = 300.0
BEATS_PER_TTL = 4


@dataclass(frozen=True)
class Peers:
    """host:port by role; rollout servers by instance name."""

    queue: str
    dcs: str
    actor: str
    rollout: dict[str, str]


@dataclass(frozen=True)
class Granted:
    """What relaxd gave this incarnation. `recipe` is None for daemons that serve many runs."""

    term: int
    run: str
    recipe: Recipe | None
    run_dir: Path
    peers: Peers
    ttl_seconds: float

    def require_recipe(self) -> Recipe:
        if self.recipe is None:
            raise NotFound("relaxd gave this daemon no run to serve")
        return self.recipe


class Registration:
    """One process's registration; `rank` and `world_size` matter for roles of several processes."""

    def __init__(self, controller: str, identity: common_pb2.Identity, *, rank: int = 0, world_size: int = 1) -> None:
        self._stub = controller_pb2_grpc.ControllerServiceStub(aio_channel(controller))
        self._controller = controller
        self._identity = identity
        self._rank = rank
        self._world_size = world_size
        self._request: controller_pb2.RegisterRequest | None = None
        self.granted: Granted | None = None

    async def register(self, address: str, metrics_address: str) -> Granted:
        """Waits until relaxd and the peers that the assignment names are there."""
        request = controller_pb2.RegisterRequest(
            identity=self._identity,
            address=address,
            metrics_address=metrics_address,
            rank=self._rank,
            world_size=self._world_size,
            pid=os.getpid(),
        )
        response = await acall_with_retry(
            lambda seconds: self._stub.Register(request, timeout=min(5.0, seconds)),
            what=f"registration at relaxd {self._controller}",
            deadline_seconds=REGISTER_DEADLINE_SECONDS,
        )
        check_protocol(response.controller)
        assignment = response.assignment
        self._request = request
        self.granted = Granted(
            term=response.term,
            run=assignment.run,
            recipe=parse_recipe(assignment.recipe_toml) if assignment.recipe_toml else None,
            run_dir=Path(assignment.run_dir),
            peers=Peers(
                assignment.peers.queue,
                assignment.peers.dcs,
                assignment.peers.actor,
                dict(assignment.peers.rollout),
            ),
            ttl_seconds=response.ttl_seconds,
        )
        if assignment.run:
            SERVES_RUN.labels(assignment.run).set(1)
        get_logger().info("registered", term=response.term, run=assignment.run)
        return self.granted

    async def heartbeats(self, waits_for: Callable[[], str], on_drain: Callable[[], None]) -> None:
        """Send heartbeats until cancelled. Raises StaleTerm when relaxd has granted a newer term to this instance."""
        if self.granted is None or self._request is None:
            raise RuntimeError("register before heartbeats")
        interval = self.granted.ttl_seconds / BEATS_PER_TTL
        while True:
            await asyncio.sleep(interval)
            request = controller_pb2.HeartbeatRequest(
                instance=self._identity.instance, term=self.granted.term, rank=self._rank, waits_for=waits_for()
            )
            try:
                response = await self._stub.Heartbeat(request, timeout=interval)
                if response.drain:
                    on_drain()
            except grpc.aio.AioRpcError as rpc_error:
                error = from_rpc(rpc_error)
                if isinstance(error, StaleTerm):
                    raise error from rpc_error
                get_logger().warning("heartbeat_unanswered", error=error.message)


PROTOCOL_VERSION = 1


def make_identity(role: common_pb2.Role, instance: str, incarnation: str = "") -> common_pb2.Identity:
    """Identity of this process; ranks of one role share an incarnation that their launcher chose."""
    started = Timestamp()
    started.FromNanoseconds(time.time_ns())
    return common_pb2.Identity(
        protocol_version=PROTOCOL_VERSION,
        release=metadata.version("relax-rl"),
        instance=instance,
        role=role,
        incarnation=incarnation or uuid.uuid4().hex,
        started_at=started,
    )


def check_protocol(peer: common_pb2.Identity) -> None:
    """Refuse a peer of another wire protocol before anything is exchanged with it."""
    if peer.protocol_version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"{peer.instance or 'peer'} (release {peer.release or 'unknown'}) speaks protocol "
            f"{peer.protocol_version}, this daemon speaks {PROTOCOL_VERSION}: install the same release on both",
        )


async def run_support_daemon(
    config: DaemonConfig,
    role: common_pb2.Role,
    service: str,
    address: str,
    metrics_address: str,
    stop: asyncio.Event,
    waits_for: Callable[[], str] = lambda: "",
) -> int:
    """Send heartbeats until `stop` is set, by a drain or because relaxd asks for it; without a controller just wait.
    `waits_for` tells what the daemon waits for; heartbeats report it."""
    if not config.controller:
        await stop.wait()
        return 0
    identity = make_identity(role, config.instance or service, config.incarnation)
    registration = Registration(config.controller, identity)
    await registration.register(address, metrics_address)
    beats = asyncio.create_task(registration.heartbeats(waits_for, stop.set))
    stopped = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait({beats, stopped}, return_when=asyncio.FIRST_COMPLETED)
    beats.cancel()
    for task in done:
        task.result()
    return 0
