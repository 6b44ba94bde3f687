"""Keeps the engine at the newest committed version: follows the dcs log, stages, swaps, verifies, confirms."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dcs.client import FULL, DcsClient
from relax.dcs.v1 import dcs_pb2
from relax_common.errors import Precondition, RelaxError, StaleTerm
from relax_common.failpoints import failpoint
from relax_common.process.telemetry import get_logger
from relax_common.rpc.channels import Backoff
from relax_common.torch_tensors import as_tensor
from relax_common.versions import PolicyVersion
from rollout_server import metrics
from rollout_server.engines.contract import Engine, EngineError, PauseMode, Probe, StagedWeights, Tolerance
from rollout_server.serving_state import (
    Serving,
    on_commit,
    on_confirmed,
    on_engine_lost,
    on_rollback,
    on_staging_begun,
    on_staging_ended,
    on_swap_begun,
    on_swap_verified,
)

WATCH_SECONDS = 3600.0
SWAP_FAILURES_MAX = 3
RECENT_RECORDS_MAX = 16
PROBE_TEMPERATURE = 1.0


@dataclass(frozen=True)
class Holder:
    """Under which name and term this server confirms."""

    server: str
    term: int


class VersionFollower:
    """`serving` is the state that leasing reads; `changed` wakes those who wait for it."""

    def __init__(
        self,
        dcs: DcsClient,
        engine: Engine,
        holder: Holder,
        swap_mode: PauseMode,
        swap_timeout_seconds: float,
        probe_tolerance: Tolerance,
    ) -> None:
        self._dcs = dcs
        self._engine = engine
        self._holder = holder
        self._swap_mode = swap_mode
        self._swap_timeout_seconds = swap_timeout_seconds
        self._probe_tolerance = probe_tolerance
        self._recent: dict[PolicyVersion, dcs_pb2.CommitRecord] = {}
        self._losses: asyncio.Queue[str] = asyncio.Queue()
        self._lost_before = False
        self.serving = Serving()
        self.changed = asyncio.Condition()
        self.waits_for = "the dcs log"

    async def follow_log(self) -> None:
        """Apply records until cancelled."""
        revision = 0
        while True:
            records = self._dcs.watch_log(revision, WATCH_SECONDS)
            while (record := await asyncio.to_thread(next, records, None)) is not None:
                revision = record.revision
                await self._apply(record)

    async def follow_engine(self) -> None:
        """An engine that lost its weights serves nothing until they have been loaded and verified again."""
        loop = asyncio.get_running_loop()

        def lost(why: str) -> None:
            loop.call_soon_threadsafe(self._losses.put_nowait, why)

        self._engine.when_lost(lost)
        while True:
            why = await self._losses.get()
            self._lost_before = True
            self.waits_for = f"the engine, which was lost: {why}"
            await self._change(on_engine_lost)

    async def keep_current(self) -> None:
        """Load each newest version into the engine, until cancelled. Raises EngineError when swaps keep failing."""
        backoff, failures = Backoff(), 0
        await self._engine_ready()
        while True:
            version = await self._next_version()
            await self._engine_ready()
            try:
                await self._bring(version)
                await self._confirm(version)
                backoff, failures, self.waits_for = Backoff(), 0, ""
                continue
            except StaleTerm:
                raise
            except EngineError as error:
                failures += 1
                if failures == SWAP_FAILURES_MAX:
                    raise
                self._failed("swap", version, str(error))
            except RelaxError as error:
                self._failed("stage", version, str(error))
            await self._change(on_staging_ended)
            await asyncio.sleep(backoff.next_seconds())

    async def wait_for(self, condition: Callable[[Serving], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: condition(self.serving))

    async def _apply(self, record: dcs_pb2.LogRecord) -> None:
        match record.WhichOneof("record"):
            case "commit":
                version = PolicyVersion.from_proto(record.commit.version)
                self._recent[version] = record.commit
                if len(self._recent) > RECENT_RECORDS_MAX:
                    del self._recent[next(iter(self._recent))]
                await self._change(lambda serving: on_commit(serving, version))
            case "rollback":
                await self._change(lambda serving: on_rollback(serving, record.rollback.head))

    async def _change(self, event: Callable[[Serving], Serving]) -> None:
        async with self.changed:
            self.serving = event(self.serving)
            metrics.VERSIONS_BEHIND.set(self.serving.versions_behind)
            self.changed.notify_all()

    async def _next_version(self) -> PolicyVersion:
        def outdated(serving: Serving) -> bool:
            return serving.target is not None and (serving.target != serving.served or not serving.confirmed)

        if not self.serving.line:
            self.waits_for = "the first committed version"
        await self.wait_for(outdated)
        target = self.serving.target
        if target is None:
            raise EngineError("no version to serve")
        return target

    async def _engine_ready(self) -> None:
        ready = self._engine.ready()
        if not ready.done():
            self.waits_for = f"the engine to start: {self._engine.health().detail}"
        await asyncio.wrap_future(ready)

    async def _bring(self, version: PolicyVersion) -> None:
        """Stage next to the live weights, then swap. Nothing to do if only the confirmation is missing."""
        if self.serving.served == version:
            return
        self.waits_for = f"version {version} from dcs"
        await self._change(lambda serving: on_staging_begun(serving, version))
        started = time.monotonic()
        staged = await asyncio.to_thread(self._stage, version, self._recent.get(version))
        metrics.STAGE_SECONDS.observe(time.monotonic() - started)
        await self._change(on_swap_begun)
        seconds = self._swap_timeout_seconds
        try:
            report = await asyncio.wait_for(asyncio.wrap_future(self._engine.swap(staged, self._swap_mode)), seconds)
        except TimeoutError as error:
            raise EngineError(f"the swap to version {version} did not end within {seconds} s") from error
        metrics.SWAP_PAUSE_SECONDS.observe(report.pause_seconds)
        metrics.PROBE_DIFFERENCE.set(report.probe_max_difference)
        if self._engine.health().version != version.pack():
            raise EngineError(f"the engine was lost right after it loaded version {version}")
        await self._change(lambda serving: on_swap_verified(serving, version))

    def _stage(self, version: PolicyVersion, record: dcs_pb2.CommitRecord | None) -> StagedWeights:
        """Whole, hash-checked tensors. Without a recent record the version must be the head, whose record dcs sends
        again."""
        if record is None:
            record = self._dcs.head().record
        if PolicyVersion.from_proto(record.version) != version:
            raise Precondition(f"version {version} is no longer the head")
        tensors = {name: as_tensor(whole) for name, whole in FULL.decode(self._dcs.pull(version)).items()}
        return StagedWeights(version.pack(), tensors, _probe(record.probe, self._probe_tolerance))

    async def _confirm(self, version: PolicyVersion) -> None:
        holder = self._holder
        await asyncio.to_thread(self._dcs.confirm, holder.server, holder.term, version)
        failpoint("rollout.after_confirm")
        await self._change(lambda serving: on_confirmed(serving, version))
        if self._lost_before:
            self._lost_before = False
            get_logger().info("engine_serves_again", version=str(version), restarts=self._engine.health().restarts)
        get_logger().debug("serves", version=str(version))

    def _failed(self, phase: str, version: PolicyVersion, message: str) -> None:
        metrics.SWAP_FAILURES.labels(phase).inc()
        self.waits_for = f"version {version}: {message}"
        get_logger().warning("version_not_served", phase=phase, version=str(version), error=message)


def _probe(probe: dcs_pb2.Probe, tolerance: Tolerance) -> Probe | None:
    if not probe.rows:
        return None
    sequences = [list(row.tokens) for row in probe.rows]
    log_probs = [np.array(row.log_probs, np.float32) for row in probe.rows]
    return Probe(sequences, log_probs, PROBE_TEMPERATURE, tolerance)
