"""The dcs daemon: servicer, state directory lock, registration."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio

from dcs.runs import Runs
from dcs.servicer import DcsServicer
from relax.common.v1 import common_pb2
from relax.dcs.v1 import dcs_pb2_grpc
from relax_common.process.config import DaemonConfig
from relax_common.process.host import lock_state_dir
from relax_common.process.telemetry import get_logger
from relax_common.rpc.registration import run_support_daemon
from relax_common.rpc.serving import EXIT_FAILED

SERVICE = "relax.dcs.v1.DcsService"


class DcsConfig(DaemonConfig):
    """Weights, commit log and recovery snapshots."""

    runs_dir: Path | None = None
    """Folder below which a run's checkpoints must be; default: anywhere."""


class DcsDaemon:
    """Implements relax_common.rpc.serving.Daemon."""

    service_names: tuple[str, ...] = (SERVICE,)

    def __init__(self, config: DcsConfig) -> None:
        self._config = config
        self._lock = lock_state_dir(config.state_dir)
        self._runs = Runs(config.state_dir, config.runs_dir)
        self._stop = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        dcs_pb2_grpc.add_DcsServiceServicer_to_server(DcsServicer(self._runs), server)

    async def run(self, address: str, metrics_address: str) -> int:
        loading = asyncio.create_task(self._runs.load_weights())
        broken = asyncio.create_task(self._runs.broken())
        serving = asyncio.create_task(
            run_support_daemon(
                self._config, common_pb2.ROLE_DCS, "dcs", address, metrics_address, self._stop, self._runs.disk_wait
            )
        )
        try:
            await asyncio.wait({serving, broken}, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                get_logger().error("fsync_failed", action="dcs ends, so that its log is read again")
                return EXIT_FAILED
            return serving.result()
        finally:
            for task in (loading, broken, serving):
                task.cancel()

    async def drain(self) -> None:
        self._stop.set()
