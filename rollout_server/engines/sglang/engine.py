"""The adapter between rollout server and SGLang: `Engine` outwards, a `Backend` inwards.

| state | requests |
|---|---|
| starting, or lost and starting again | those in the engine have ended with the tokens they had; new ones wait |
| ready, no version | wait for the first swap |
| version loaded | are answered |
| paused | nothing is in SGLang: samples were taken out with the tokens they have, and continue after `resume` |
| swapping, in_place or retract | stay in SGLang; samples that end early are held, and kept if the probe agrees |
| swapping, abort | are taken out with the tokens they have, and submitted again as prompts under the new version |
"""

import asyncio
import contextvars
import json
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from relax_common.errors import InvalidInput
from relax_common.json_types import JsonObject
from relax_common.process.telemetry import get_logger
from relax_common.rpc.channels import Backoff
from relax_common.storage.model_folder import weight_shapes
from relax_common.versions import PackedVersion
from rollout_server import metrics
from rollout_server.engines.contract import (
    Completion,
    EngineError,
    EngineHealth,
    EngineUnusable,
    GenerateRequest,
    PauseMode,
    Probe,
    RequestRefused,
    StagedWeights,
    SwapReport,
)
from rollout_server.engines.limits import read_limits
from rollout_server.engines.sglang.backend import Backend, BackendLost
from rollout_server.engines.sglang.gate import Gate
from rollout_server.engines.sglang.generation import Generation

T = TypeVar("T")
STARTS_MAX = 3
"""Failed starts in a row after which the engine is given up."""
STOP_SECONDS = 40.0


class SglangEngine:
    """See `Engine`. A thread of its own runs one event loop; all state belongs to that loop."""

    def __init__(self, model_dir: Path, backend: Backend) -> None:
        self._limits = read_limits(model_dir)
        self._shapes = tensor_shapes(model_dir)
        self._backend = backend
        self._gate = Gate()
        self._generation = Generation(backend, self._gate, sorted(self._limits.end_ids))
        self._controls = asyncio.Lock()
        self._callbacks: list[Callable[[str], None]] = []
        self._detail = "sglang, starting"
        # A fixed kind of loop: the process's default one may not be able to watch children from a thread.
        self._loop = asyncio.SelectorEventLoop()
        # The thread's log lines carry what the starter's carry.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="engine", daemon=True)
        self._thread.start()

    def ready(self) -> Future[None]:
        return self._post(self._gate.wait_started())

    def when_lost(self, callback: Callable[[str], None]) -> None:
        self._callbacks.append(callback)

    def generate(self, request: GenerateRequest) -> Future[list[Completion]]:
        self._limits.check(request)
        return self._post(self._generation.generate(request))

    def abort(self, request_id: str) -> None:
        self._post(self._generation.abort(lambda job: job.request.request_id == request_id))

    def pause(self, mode: PauseMode) -> Future[None]:
        return self._post(self._pause(mode))

    def resume(self) -> None:
        self._post(self._resume())

    def swap(self, staged: StagedWeights, mode: PauseMode) -> Future[SwapReport]:
        return self._post(self._swap(staged, mode))

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> Future[list[npt.NDArray[np.float32]]]:
        return self._post(self._score(sequences, temperature))

    def health(self) -> EngineHealth:
        running = self._generation.running_samples
        return EngineHealth(
            alive=self._thread.is_alive() and not self._gate.failure,
            paused=self._gate.paused,
            version=self._gate.version,
            running_samples=running,
            waiting_samples=max(0, self._generation.unfinished_samples - running),
            restarts=self._gate.restarts,
            detail=self._detail,
        )

    def close(self) -> None:
        self._post(self._stop())
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            raise EngineError(f"the engine did not stop within {STOP_SECONDS:.0f} s")

    def _post(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self._gate.closing or not self._thread.is_alive():
            coroutine.close()
            failed: Future[T] = Future()
            failed.set_exception(EngineError("the engine has stopped"))
            return failed
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    # The methods below run on the loop.

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._supervise())

    async def _supervise(self) -> None:
        """Start the backend, watch it, start it again, until closed or given up."""
        failures, backoff = 0, Backoff()
        while not self._gate.closing:
            began = time.monotonic()
            try:
                self._detail = await self._backend.start(self._gate.restarts + failures)
            except EngineError as error:
                failures += 1
                await self._backend.close()
                if failures == STARTS_MAX or isinstance(error, EngineUnusable):
                    await self._give_up(error)
                    break
                get_logger().warning("engine_not_started", error=str(error))
                await asyncio.sleep(backoff.next_seconds())
                continue
            failures, backoff = 0, Backoff()
            seconds = round(time.monotonic() - began, 1)
            get_logger().info("engine_started", engine=self._detail, seconds=seconds, restarts=self._gate.restarts)
            self._gate.started = True
            await self._gate.notify()
            await self._lost(await self._backend.lost())
        await self._gate.wait_closing()
        await self._backend.close()
        # Tell callers that still wait that the engine has stopped, before the loop ends.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(others, timeout=STOP_SECONDS / 2) if others else None

    async def _give_up(self, why: EngineError) -> None:
        if self._gate.closing:
            return
        self._gate.failure = why
        self._detail = "sglang, not started"
        get_logger().error("engine_given_up", error=str(why))
        await self._gate.notify()
        self._tell_lost(str(why))

    async def _lost(self, why: str) -> None:
        if self._gate.closing:
            return
        self._gate.forget_weights()
        self._gate.restarts += 1
        self._detail = f"sglang, starting again: {why}"
        metrics.ENGINE_RESTARTS.inc()
        get_logger().warning("engine_lost", why=why, restarts=self._gate.restarts)
        await self._generation.end_all()
        self._tell_lost(why)

    def _tell_lost(self, why: str) -> None:
        for callback in self._callbacks:
            callback(why)

    async def _stop(self) -> None:
        self._gate.closing = True
        await self._gate.notify()
        await self._backend.close()

    async def _pause(self, mode: PauseMode) -> None:
        async with self._controls:
            self._gate.paused = True
            if mode is PauseMode.ABORT:
                await self._generation.abort(lambda job: True)
            else:
                await self._generation.collect()

    async def _resume(self) -> None:
        self._gate.paused = False
        await self._gate.notify()

    async def _score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[npt.NDArray[np.float32]]:
        if temperature != 1.0:
            raise RequestRefused(f"temperature = {temperature}: SGLang scores given tokens at temperature 1 only")
        async with self._controls:
            await self._gate.wait_started()
            return [await self._backend.score(sequence) for sequence in sequences]

    async def _swap(self, staged: StagedWeights, mode: PauseMode) -> SwapReport:
        check_tensors(self._shapes, staged.tensors)
        async with self._controls:
            await self._gate.wait_started()
            incarnation = self._gate.restarts
            try:
                await self._backend.stage(staged.version, staged.tensors)
                began = time.perf_counter()
                difference = await self._exchange(staged, mode)
                if self._gate.restarts != incarnation:
                    raise BackendLost(f"the engine was lost while version {staged.version} was checked")
                self._gate.version = staged.version
            except BackendLost as error:
                # Recorded before the process has ended: nobody may retry on an engine that is ending.
                if self._gate.restarts == incarnation:
                    self._gate.forget_weights()
                    await self._backend.discard(str(error))
                raise
            except asyncio.CancelledError:
                # The caller has given up, perhaps in the middle: the engine may be paused or have mixed weights.
                if self._gate.swapping:
                    self._gate.forget_weights()
                    await self._backend.discard(f"the swap to version {staged.version} was given up")
                raise
            finally:
                self._gate.swapping = False
                self._gate.verified.set()
                await self._gate.notify()
        return SwapReport(staged.version, time.perf_counter() - began, difference)

    async def _exchange(self, staged: StagedWeights, mode: PauseMode) -> float:
        self._gate.swapping = True
        if mode is PauseMode.ABORT:
            await self._generation.collect()
        self._gate.loading(staged.version)
        return await self._load(staged, mode)

    async def _load(self, staged: StagedWeights, mode: PauseMode) -> float:
        """Replace the live weights and verify them. After a failure nothing is served and no request is in the
        engine."""
        in_place = mode is PauseMode.IN_PLACE
        try:
            await self._backend.pause("in_place" if in_place else "retract")
            await self._backend.load(staged.version, flush=not in_place)
            await self._backend.resume()
        except EngineError as error:
            await self._generation.end_all()
            await self._backend.discard(f"the swap to version {staged.version} broke: {error}")
            raise
        try:
            return await self._probe(staged.probe, staged.version) if staged.probe is not None else 0.0
        except EngineError:
            await self._generation.discard()
            raise

    async def _probe(self, probe: Probe, version: PackedVersion) -> float:
        if probe.temperature != 1.0:
            raise EngineError(f"version {version}: the probe has temperature {probe.temperature}, SGLang scores at 1")
        pairs = zip(probe.sequences, probe.log_probs, strict=True)
        scored = [await self._backend.score(sequence) if len(theirs) else theirs for sequence, theirs in pairs]
        return probe.check(scored, version)


def read_config(model_dir: Path) -> JsonObject:
    config: JsonObject = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    return config


def tensor_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter; a tied output layer is its embedding and does not count."""
    try:
        shapes = weight_shapes(model_dir)
    except InvalidInput as error:
        raise EngineError(error.message) from error
    if read_config(model_dir).get("tie_word_embeddings", False):
        shapes.pop("lm_head.weight", None)
    return shapes


def check_tensors(expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    """SGLang skips unknown names and keeps the old values of missing ones, so both are refused before loading."""
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        raise EngineError(f"the version's tensors are not the model's: missing {missing[:3]}, unknown {unknown[:3]}")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise EngineError(f"{name} is {tuple(tensors[name].shape)}, the model has {shape}")
