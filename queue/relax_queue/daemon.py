"""The queue daemon: servicer, state directory lock, registration."""

import asyncio

import grpc.aio

from relax.common.v1 import common_pb2
from relax.queue.v1 import queue_pb2_grpc
from relax_common.daemon_config import DaemonConfig
from relax_common.errors import RelaxError
from relax_common.statedir import lock_state_dir
from relax_common.support import run_support_daemon
from relax_queue.broker import Broker
from relax_queue.servicer import QueueServicer

SERVICE = "relax.queue.v1.QueueService"


class QueueConfig(DaemonConfig):
    """The sample bus: groups, leases, rows and plans."""


class QueueDaemon:
    """Implements relax_common.serving.Daemon."""

    service_names: tuple[str, ...] = (SERVICE,)

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._lock = lock_state_dir(config.state_dir)
        self._broker = Broker(config.state_dir)
        self._stop = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        queue_pb2_grpc.add_QueueServiceServicer_to_server(QueueServicer(self._broker), server)

    async def run(self, address: str, metrics_address: str) -> int:
        broken = asyncio.create_task(self._broker.serve())
        role = common_pb2.ROLE_QUEUE
        bond = asyncio.create_task(
            run_support_daemon(self._config, role, "queue", address, metrics_address, self._stop)
        )
        try:
            await asyncio.wait({broken, bond}, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                raise RelaxError(broken.result())
            return bond.result()
        finally:
            bond.cancel()
            broken.cancel()
            self._broker.close()

    async def drain(self) -> None:
        self._stop.set()
