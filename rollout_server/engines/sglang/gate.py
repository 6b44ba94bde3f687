"""Decides when samples may enter the engine: the adapter's state as requests see it. Runs on one event loop."""

import asyncio

from relax_common.versions import PackedVersion
from rollout_server.engines.contract import EngineError
from rollout_server.engines.sglang.jobs import Job

VERSIONS_REMEMBERED = 64


class Gate:
    """Samples enter the engine while a verified version is loaded and there is no pause or swap.

    `verified` is set except during a swap: a sample that ends during a swap is held until the probe has decided.
    """

    def __init__(self) -> None:
        self.started = False
        self.paused = False
        self.swapping = False
        self.closing = False
        self.failure: EngineError | None = None
        self.version: PackedVersion | None = None
        self.loaded: list[int] = []
        self.restarts = 0
        self.verified = asyncio.Event()
        self.verified.set()
        self._changed = asyncio.Condition()

    async def notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def enter(self, job: Job) -> bool:
        """Returns True once a sample may enter, False if its job was aborted during the wait."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._stopped or job.aborted or self._open)
        self.check_alive()
        return not job.aborted

    async def wait_started(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._stopped or self.started)
        self.check_alive()

    async def wait_closing(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.closing)

    def check_alive(self) -> None:
        if self._stopped:
            raise self.failure or EngineError("the engine has stopped")

    def loading(self, version: PackedVersion) -> None:
        """From here the live weights belong to no version; afterwards to this one, if the probe agrees."""
        self.version = None
        self.loaded = [*self.loaded[-VERSIONS_REMEMBERED:], version]
        self.verified.clear()

    def forget_weights(self) -> None:
        self.started = False
        self.version = None
        self.loaded = []

    @property
    def _open(self) -> bool:
        return self.version is not None and not self.paused and not self.swapping

    @property
    def _stopped(self) -> bool:
        return self.closing or self.failure is not None
