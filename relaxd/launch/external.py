"""Roles that something else starts and restarts (systemd, Slurm): relaxd sees them register and fall silent.

A role that ends by itself leaves a file that shows its end; the others end when the answer to a heartbeat tells them
to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from relax_common.process.telemetry import get_logger
from relaxd.launch.launcher import ProcessSpec
from relaxd.registry import Registry

_LOOK_SECONDS = 0.2


class ExternalProcess:
    """A process that relaxd can ask to end, but not start or kill. Implements launcher.Process."""

    pid = 0
    incarnation = ""

    def __init__(self, spec: ProcessSpec, registry: Registry) -> None:
        self._spec = spec
        self._registry = registry
        self._told = False

    @property
    def rank(self) -> int:
        return self._spec.rank

    @property
    def running(self) -> bool:
        if self._done():
            return False
        return not self._told or self._registry.beating(self._spec.instance)

    @property
    def exit_code(self) -> int | None:
        return 0 if self._done() else None

    def _done(self) -> bool:
        return self._spec.leaves is not None and self._spec.leaves.exists()

    async def wait(self) -> None:
        while self.running:
            await asyncio.sleep(_LOOK_SECONDS)

    async def stop(self, grace_seconds: float) -> None:
        """The process is told with its next heartbeat. This waits for its end but does not kill it; its launcher
        can."""
        self._told = True
        self._registry.drain(self._spec.instance)
        end = time.monotonic() + grace_seconds
        while self._registry.beating(self._spec.instance):
            if time.monotonic() > end:
                get_logger().warning("daemon_does_not_end", instance=self._spec.instance)
                return
            await asyncio.sleep(_LOOK_SECONDS)

    async def kill(self) -> None:
        """relaxd cannot kill it; its old term is fenced instead."""


class ExternalLauncher:
    """Starts nothing."""

    owns_processes = False

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def launch(self, specs: Sequence[ProcessSpec]) -> Sequence[ExternalProcess]:
        return [ExternalProcess(spec, self._registry) for spec in specs]
