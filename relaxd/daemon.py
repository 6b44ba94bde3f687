"""The controller daemon."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import grpc.aio
from pydantic import BeforeValidator, Field

from relax.controller.v1 import controller_pb2_grpc
from relax_common.errors import StaleTerm
from relax_common.process.config import DaemonConfig
from relax_common.process.host import lock_state_dir
from relaxd.controller import Controller, Settings
from relaxd.plan.code_names import check_allowed
from relaxd.servicer import ControllerServicer

SERVICE = "relax.controller.v1.ControllerService"


def _split(value: object) -> object:
    return [name for name in value.split(",") if name] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]


class RelaxdConfig(DaemonConfig):
    """The controller: runs, daemons, terms."""

    ttl_seconds: float = Field(15.0, gt=0, allow_inf_nan=False)
    """A daemon that is silent for so long is replaced."""
    allow_programs: Names = ()
    """Interpreters that a recipe sent to this relaxd may name in rollout.engine_python, separated by commas."""
    allow_imports: Names = ()
    """Functions (package.module:function) that such a recipe may name as generator or reward, separated by commas."""
    launcher: Literal["local", "none"] = "local"
    """local: relaxd starts a run's daemons on this host; none: systemd or Slurm has started them, and they register."""
    runs_dir: Path | None = None
    """Folder that contains all run directories; default: runs below the state directory."""


class RelaxdDaemon:
    """Implements relax_common.rpc.serving.Daemon."""

    service_names: tuple[str, ...] = (SERVICE,)

    def __init__(self, config: RelaxdConfig) -> None:
        self._lock = lock_state_dir(config.state_dir)
        state_dir = config.state_dir.resolve()
        self._controller = Controller(
            Settings(
                state_dir=state_dir,
                runs_dir=(config.runs_dir or state_dir / "runs").resolve(),
                ttl_seconds=config.ttl_seconds,
                instance=config.instance or "relaxd",
                starts_daemons=config.launcher == "local",
                check_allowed=partial(check_allowed, programs=config.allow_programs, imports=config.allow_imports),
            ),
            self._fence,
        )
        self._stop = asyncio.Event()
        self._fenced: StaleTerm | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(ControllerServicer(self._controller), server)

    async def run(self, address: str, metrics_address: str) -> int:
        await self._controller.start(address, metrics_address)
        await self._stop.wait()
        if self._fenced is not None:
            await self._controller.stop()
            raise self._fenced
        return 0

    def _fence(self, error: StaleTerm) -> None:
        self._fenced = error
        self._stop.set()

    async def drain(self) -> None:
        await self._controller.stop()
        self._stop.set()
