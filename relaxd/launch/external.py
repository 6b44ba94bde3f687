"""A role that something else starts and restarts (systemd, Slurm): relaxd sees it register and fall silent.

The actor's end shows in its export; the others end by being told to, in the answer to a heartbeat.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from relax_common.process.logs import get_logger
from relaxd.launch.local import ProcessSpec
from relaxd.registry import Registry

STOP_SECONDS = 30.0
_LOOK_SECONDS = 0.2


class ExternalSupervisor:
    """Takes the place of `Supervisor`. `export` is what the role leaves behind once it has done its work."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        registry: Registry,
        *,
        export: Path | None,
        on_event: Callable[[str, dict[str, object]], None],
    ) -> None:
        self.instance = specs[0].instance
        self.restarts = 0
        self._registry = registry
        self._export = export
        self._on_event = on_event
        self._stopping = False

    async def run(self) -> str:
        """Until the role has left its export, or was stopped."""
        while not self._stopping and not (self._export is not None and (self._export / "config.json").exists()):
            await asyncio.sleep(_LOOK_SECONDS)
        return ""

    def progress(self) -> None:
        return

    def lease_ran_out(self, rank: int, incarnation: str) -> None:
        """Whoever started it starts it again; its old term is fenced."""
        self._on_event("daemon_lost", {"instance": self.instance, "rank": rank, "why": "lease ran out"})

    async def stop(self) -> None:
        """Told with its next heartbeat; waited for, but not killed: that is its launcher's."""
        self._stopping = True
        self._registry.drain(self.instance)
        end = time.monotonic() + STOP_SECONDS
        while self._registry.beating(self.instance) and time.monotonic() < end:
            await asyncio.sleep(_LOOK_SECONDS)
        if self._registry.beating(self.instance):
            get_logger().warning("daemon_does_not_end", instance=self.instance)
