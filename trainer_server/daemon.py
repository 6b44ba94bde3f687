"""The daemon of one rank: registers, then trains in its own thread while the event loop serves calls."""

import asyncio
import contextvars
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc.aio
import structlog
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from dcs.client import DcsClient
from relax.trainer.v1 import trainer_pb2_grpc
from relax_common.errors import InvalidInput, RelaxError, StaleTerm
from relax_common.process.config import EXIT_BAD_CONFIG
from relax_common.process.telemetry import get_logger
from relax_common.rpc.registration import Granted, Registration, make_identity
from relax_common.rpc.serving import EXIT_FAILED, EXIT_STALE_TERM
from relax_queue.client import QueueClient
from trainer_server.config import TrainerConfig
from trainer_server.context import Assignment, RankContext
from trainer_server.megatron.parallel import process_groups
from trainer_server.megatron.trainer import NonFiniteUpdates
from trainer_server.model.hf_config import ModelError
from trainer_server.rank_group import LostRank, RankGroup
from trainer_server.roles import ROLES, Role
from trainer_server.servicer import TrainerServicer
from trainer_server.status import RoleStatus
from trainer_server.step.reader import RoleStopped

SERVICE = "relax.trainer.v1.TrainerService"
EXIT_LOST_RANK = 5


class TrainerDaemon:
    """Implements relax_common.rpc.serving.Daemon. Rank 0 serves relax.trainer.v1; the others serve health only."""

    def __init__(self, config: TrainerConfig) -> None:
        if config.world_size > 1 and not config.store:
            raise InvalidInput(f"--store is needed for {config.world_size} ranks: host:port where they meet")
        if config.rank >= config.world_size:
            raise InvalidInput(f"--rank {config.rank} does not exist among --world-size {config.world_size}")
        if not config.controller:
            raise InvalidInput("--controller is needed: relaxd tells a trainer which run it serves")
        self._config = config
        self._status = RoleStatus()
        self._identity = make_identity(_role_of(config).kind, config.instance or config.role, config.incarnation)
        self._ended = asyncio.Event()
        self.service_names: tuple[str, ...] = (SERVICE,) if config.rank == 0 else ()

    def add_to(self, server: grpc.aio.Server) -> None:
        if self._config.rank == 0:
            servicer = TrainerServicer(self._status, self._identity, self._config.world_size)
            trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server)

    async def run(self, address: str, metrics_address: str) -> int:
        config = self._config
        registration = Registration(config.controller, self._identity, rank=config.rank, world_size=config.world_size)
        self._status.waits_for = "relaxd to grant a term"
        granted = await registration.register(address, metrics_address)
        self._status.run, self._status.term = granted.run, granted.term
        structlog.contextvars.bind_contextvars(run=granted.run, term=granted.term, rank=config.rank)
        # Its own executor: at exit the loop waits for its default one, even if a collective is stuck.
        context = contextvars.copy_context()
        work = asyncio.get_running_loop().run_in_executor(
            ThreadPoolExecutor(1, "training"), context.run, train_role, config, granted, self._status
        )
        beats = asyncio.create_task(registration.heartbeats(lambda: self._status.waits_for, self._status.stop.set))
        try:
            waits: set[asyncio.Future[Any]] = {work, beats}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            # The heartbeat ends only when there is a newer term; the thread may then hang in a dead collective.
            return work.result() if work.done() else exit_code(beats.exception())
        finally:
            self._ended.set()
            beats.cancel()

    async def drain(self) -> None:
        self._status.stop.set()
        await self._ended.wait()


def _role_of(config: TrainerConfig) -> Role:
    if config.role not in ROLES:
        raise InvalidInput(f"--role {config.role}: known roles are {', '.join(ROLES)}")
    return ROLES[config.role]


def train_role(config: TrainerConfig, granted: Granted, status: RoleStatus) -> int:
    """The role's whole life on this rank. Returns the exit code."""
    try:
        _train(config, granted, status)
    except RoleStopped:
        get_logger().info("stopped_by_request", step=status.step)
    except (RelaxError, ModelError, NonFiniteUpdates, LostRank) as error:
        return exit_code(error)
    except dist.DistError as error:
        return exit_code(LostRank(f"rank {config.rank}: a collective failed: {error}"))
    return 0


def exit_code(error: BaseException | None) -> int:
    line = str(error).partition("\n")[0]
    get_logger().error("ended", error=line)
    print(f"relax-trainer: {line}", file=sys.stderr)
    if isinstance(error, StaleTerm):
        return EXIT_STALE_TERM
    if isinstance(error, (InvalidInput, ModelError)):
        return EXIT_BAD_CONFIG  # starting again cannot help
    return EXIT_LOST_RANK if isinstance(error, LostRank) else EXIT_FAILED


def _train(config: TrainerConfig, granted: Granted, status: RoleStatus) -> None:
    recipe, role = granted.require_recipe(), ROLES[config.role]
    torch.set_num_threads(recipe.actor.threads_per_rank)
    parallel = role.parallel(recipe, config.rank, config.world_size)
    name = f"{config.role}-{granted.term}"
    with process_groups(parallel, _store(config), name, config.collective_timeout_seconds):
        context = RankContext(
            assignment=Assignment(
                granted.run, granted.term, recipe, granted.run_dir, config.controller, config.instance or config.role
            ),
            parallel=parallel,
            group=RankGroup(config.rank, config.world_size, config.collective_timeout_seconds),
            dcs=DcsClient(granted.peers.dcs, granted.run, on_wait=status.wait_for),
            queue=QueueClient(granted.peers.queue, granted.run),
            status=status,
        )

        def register() -> bytes:
            # The head is read only after this, when calls of an older incarnation can no longer change it.
            context.dcs.register_term(config.role, granted.term)
            context.queue.register_term(config.role, granted.term)
            return b""

        context.group.patiently(lambda: context.group.share(register), "the term")
        role.run(context)


def _store(config: TrainerConfig) -> Store:
    if config.world_size == 1:
        return HashStore()
    host, _, port = config.store.rpartition(":")
    if host in ("127.0.0.1", "localhost"):
        # Ranks of one host: do not let gloo pick an interface by resolving the host's name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return TCPStore(host, int(port), config.world_size, is_master=config.rank == 0)
