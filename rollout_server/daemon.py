"""The rollout daemon: gets its assignment, then follows versions and leases groups until told to stop."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc.aio

from relax.common.v1 import common_pb2
from relax.rollout.v1 import rollout_pb2_grpc
from relax_common.errors import InvalidInput, RelaxError, StaleTerm, Unavailable
from relax_common.process.telemetry import get_logger
from relax_common.rpc.registration import Granted, Registration, make_identity
from relax_queue.client import AioQueueClient
from rollout_server.assignment import Work, start_work
from rollout_server.config import RolloutConfig
from rollout_server.engines.contract import EngineError, EngineUnusable
from rollout_server.servicer import RolloutServicer

SERVICE = "relax.rollout.v1.RolloutService"
DRAIN_GRACE_SECONDS = 2.0
# Blocking client calls at the same time: the log, and a version being staged and confirmed.
CALL_THREADS = 4


class RolloutDaemon:
    """Implements relax_common.rpc.serving.Daemon."""

    service_names: tuple[str, ...] = (SERVICE,)

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._identity = make_identity(common_pb2.ROLE_ROLLOUT, config.instance or "rollout", config.incarnation)
        self._servicer = RolloutServicer(self._identity)

    def add_to(self, server: grpc.aio.Server) -> None:
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self._servicer, server)

    async def run(self, address: str, metrics_address: str) -> int:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(CALL_THREADS))
        registration = Registration(self._config.controller, self._identity)
        granted = await registration.register(address, metrics_address)
        drain = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as tasks:
                # Heartbeats begin before loading: on a busy host a model takes longer to load than relaxd waits for a
                # heartbeat.
                beats = tasks.create_task(registration.heartbeats(self._waits_for, drain.set))
                await self._work(granted, drain)
                beats.cancel()
        except* (EngineError, RelaxError) as errors:
            raise _reason(errors) from errors
        return 0

    async def drain(self) -> None:
        if self._servicer.work is not None:
            returned = await self._servicer.work.groups.drain(DRAIN_GRACE_SECONDS)
            get_logger().info("drained", groups_returned=returned)

    def _waits_for(self) -> str:
        work = self._servicer.work
        return work.waits_for if work is not None else "tokenizer, engine and reward workers to load"

    async def _work(self, granted: Granted, drain: asyncio.Event) -> None:
        queue = AioQueueClient(granted.peers.queue, granted.run)
        await queue.register_term(self._identity.instance, granted.term)
        work = await asyncio.to_thread(start_work, granted, self._identity.instance, queue, self._config)
        self._servicer.work = work
        try:
            await self._serve(work, drain)
        finally:
            await asyncio.to_thread(work.close)
            await queue.close()

    async def _serve(self, work: Work, drain: asyncio.Event) -> None:
        """Ends when the run has ended or relaxd says drain."""
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(work.follower.follow_log()),
                tasks.create_task(work.follower.follow_engine()),
                tasks.create_task(work.follower.keep_current()),
                tasks.create_task(work.groups.renew()),
            ]
            leasing = tasks.create_task(work.groups.run())
            told = tasks.create_task(drain.wait())
            await asyncio.wait({leasing, told}, return_when=asyncio.FIRST_COMPLETED)
            await self.drain()
            for task in (*background, leasing, told):
                task.cancel()


def _reason(errors: ExceptionGroup[EngineError | RelaxError]) -> RelaxError:
    """The one error that the caller prints: the first of the tasks that failed together.

    An old term goes before everything else: the daemon has been replaced, so it must not be started again.
    """
    found = list(_errors(errors))
    error = next((e for e in found if isinstance(e, StaleTerm)), found[0])
    if isinstance(error, EngineUnusable):
        return InvalidInput(f"the engine: {error}")
    return Unavailable(f"the engine: {error}") if isinstance(error, EngineError) else error


def _errors(group: ExceptionGroup[EngineError | RelaxError]) -> Iterator[EngineError | RelaxError]:
    """The errors in nested task groups."""
    for error in group.exceptions:
        if isinstance(error, ExceptionGroup):
            yield from _errors(error)
        else:
            yield error
