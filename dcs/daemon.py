"""The dcs daemon: servicer, state directory lock, registration."""

from __future__ import annotations

import asyncio

import grpc.aio

from dcs.servicer import DcsServicer
from relax.common.v1 import common_pb2
from relax.dcs.v1 import dcs_pb2_grpc
from relax_common.process.config import DaemonConfig
from relax_common.process.state_dir import lock_state_dir
from relax_common.rpc.support import run_support_daemon

SERVICE = "relax.dcs.v1.DcsService"


class DcsConfig(DaemonConfig):
    """Weights, commit log and recovery snapshots."""


class DcsDaemon:
    """Implements relax_common.rpc.serving.Daemon."""

    service_names: tuple[str, ...] = (SERVICE,)

    def __init__(self, config: DcsConfig) -> None:
        self._config = config
        self._lock = lock_state_dir(config.state_dir)
        self._servicer = DcsServicer(config.state_dir)
        self._stop = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        dcs_pb2_grpc.add_DcsServiceServicer_to_server(self._servicer, server)

    async def run(self, address: str, metrics_address: str) -> int:
        return await run_support_daemon(self._config, common_pb2.ROLE_DCS, "dcs", address, metrics_address, self._stop)

    async def drain(self) -> None:
        self._stop.set()
