"""The queue daemon: servicer, state directory lock, registration."""

import asyncio
import secrets

import grpc.aio
from pydantic import Field

from relax.common.v1 import common_pb2
from relax.queue.v1 import queue_pb2_grpc
from relax_common.errors import RelaxError
from relax_common.process.config import DaemonConfig
from relax_common.process.host import lock_state_dir
from relax_common.process.telemetry import get_logger
from relax_common.rpc.registration import run_support_daemon
from relax_queue.broker.broker import Broker
from relax_queue.broker.metrics import publish_arena
from relax_queue.broker.servicer import QueueServicer
from relax_queue.storage.disk import DiskSizes
from relax_queue.transport.frames import RawPayload
from relax_queue.transport.shm.arena import Arena
from relax_queue.transport.shm.slabs import Slabs

SERVICE = "relax.queue.v1.QueueService"


class QueueConfig(DaemonConfig):
    """The sample bus: groups, leases, rows and plans."""

    segment_bytes: int = Field(DiskSizes().segment_bytes, ge=1024)
    """A segment of a run's log is closed, and a snapshot taken, once it has this size and that of the last snapshot."""
    history_bytes: int = Field(DiskSizes().history_bytes, ge=0)
    """Closed segments that are kept for watchers that have not seen their events."""
    payload_file_bytes: int = Field(DiskSizes().payload_file_bytes, ge=1024)
    """Size above which a payload file takes no more blocks (durability full)."""

    arena_bytes: int = Field(1 << 30, ge=0)
    """Most shared memory for rows, which processes of this host can map; further rows go to the heap. 0: none."""


def _sizes(config: QueueConfig) -> DiskSizes:
    return DiskSizes(config.segment_bytes, config.history_bytes, config.payload_file_bytes)


class QueueDaemon:
    """Implements relax_common.rpc.serving.Daemon."""

    service_names: tuple[str, ...] = (SERVICE,)

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._lock = lock_state_dir(config.state_dir)
        self._broker = Broker(config.state_dir, _sizes(config))
        self._slabs = Slabs(Arena(config.arena_bytes))
        publish_arena(self._slabs)
        self._stop = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        servicer = QueueServicer(self._broker, self._slabs)
        servicer.unix_target = self._listen_on_host(server)
        queue_pb2_grpc.add_QueueServiceServicer_to_server(servicer, RawPayload(server))

    def _listen_on_host(self, server: grpc.aio.Server) -> str:
        """A second socket that costs callers of this host half as much CPU; "" if it cannot be bound.

        Its name is random and new at each start, so a caller that connects is on this host, and no file has to be
        removed.
        """
        target = f"unix-abstract:relax-queue-{secrets.token_hex(8)}"
        try:
            server.add_insecure_port(target)
        except RuntimeError:
            get_logger().warning("host_socket_not_bound", target=target)
            return ""
        return target

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
