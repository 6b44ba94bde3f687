"""The embedded engine: continuous batching over one Hugging Face module, in its own thread.

The thread alternates between control calls (pause, swap, score) and decode steps. A decode step admits the waiting
requests, computes one token for every row, and resolves the requests whose rows have all ended. So a control call waits
for at most one step, and no step ever sees two versions of the weights.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax_common.rpc.portal import promise
from relax_common.versions import PackedVersion
from rollout_server.engines.contract import (
    Completion,
    EngineError,
    EngineHealth,
    FinishReason,
    GenerateRequest,
    PauseMode,
    StagedWeights,
    SwapReport,
)
from rollout_server.engines.limits import read_limits
from rollout_server.engines.torch.batch import Batch, append_column, merge, prompt_batch, repeat_rows, select
from rollout_server.engines.torch.model import check_weights, copy_weights, load_model, next_logits, score_sequences
from rollout_server.engines.torch.sampling import sample_tokens, uniforms

T = TypeVar("T")
STOP_TIMEOUT_SECONDS = 30.0
# Groups arrive in bursts, and a forward pass costs about the same for one group as for many: an idle engine waits
# until a burst has passed. While rows are decoding, new requests wait for others, since each prefill delays those rows.
GATHER_GAP_SECONDS = 0.004
GATHER_IDLE_SECONDS = 0.012
GATHER_BUSY_SECONDS = 0.02


@dataclass
class _Job:
    """A request in the engine: its completions by sample, and the future that waits for them."""

    request: GenerateRequest
    future: Future[list[Completion]]
    completions: list[Completion | None]
    posted_at: float


class TorchEngine:
    """See `Engine`. It starts without weights: the first `swap` brings them.

    one_request_at_a_time: which rows are computed together changes the last bits of their log-probs; computed alone, a
    request with seeds always gives the same bits.
    """

    def __init__(
        self, model_dir: Path, seed: int, dtype: torch.dtype = torch.float32, *, one_request_at_a_time: bool = False
    ) -> None:
        self._model = load_model(model_dir, dtype)
        self._limits = read_limits(model_dir)
        self._end_ids = torch.tensor(sorted(self._limits.end_ids))
        self._generator = torch.Generator().manual_seed(seed)
        self._one_request_at_a_time = one_request_at_a_time
        # Not a SimpleQueue: its get(timeout) can sleep without end if the timeout expires between two of its own steps
        # (CPython 3.11), and timeouts here are microseconds.
        self._inbox: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._waiting: list[_Job] = []
        self._jobs: dict[int, _Job] = {}
        self._next_owner = 0
        self._batch: Batch | None = None
        self._version: PackedVersion | None = None
        self._paused = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def ready(self) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def when_lost(self, callback: Callable[[str], None]) -> None:
        """Never calls back: embedded weights are lost only with the process, or with the thread, which fails every
        future."""

    def generate(self, request: GenerateRequest) -> Future[list[Completion]]:
        self._limits.check(request)
        job = _Job(request, promise(), [None] * request.n_samples, time.monotonic())
        self._post(lambda: self._waiting.append(job), job.future)
        return job.future

    def abort(self, request_id: str) -> None:
        self._inbox.put(lambda: self._abort(lambda job: job.request.request_id == request_id))

    def pause(self, mode: PauseMode) -> Future[None]:
        return self._control(lambda: self._pause(mode))

    def resume(self) -> None:
        self._inbox.put(self._resume)

    def swap(self, staged: StagedWeights, mode: PauseMode) -> Future[SwapReport]:
        return self._control(lambda: self._swap(staged, mode))

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> Future[list[npt.NDArray[np.float32]]]:
        return self._control(lambda: score_sequences(self._model, sequences, temperature))

    def health(self) -> EngineHealth:
        return EngineHealth(
            alive=self._thread.is_alive(),
            paused=self._paused,
            version=self._version,
            running_samples=sum(job.request.n_samples for job in list(self._jobs.values())),
            waiting_samples=sum(job.request.n_samples for job in list(self._waiting)),
            detail=f"torch {torch.__version__}, embedded",
        )

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join(STOP_TIMEOUT_SECONDS)
        if self._thread.is_alive():
            raise EngineError(f"the engine's decode step did not end within {STOP_TIMEOUT_SECONDS} s")

    def _control(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = promise()

        def run() -> None:
            try:
                result = call()
            except (RuntimeError, ValueError, KeyError) as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._post(run, future)
        return future

    def _post(self, call: Callable[[], None], future: Future[T]) -> None:
        if not self._thread.is_alive():
            future.set_exception(EngineError("the engine has stopped"))
            return
        self._inbox.put(call)

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while self._handle_inbox():
                if self._may_decode():
                    self._decode_step()
        finally:
            self._version = None
            self._fail_everything()

    def _handle_inbox(self) -> bool:
        """Run what was posted; sleeps while there is nothing to decode yet. False: stop."""
        while True:
            patience = self._patience_seconds()
            try:
                call = self._inbox.get(block=patience != 0.0, timeout=patience)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()

    def _patience_seconds(self) -> float | None:
        """How long the next decode step may wait for calls; None: until one comes."""
        if (self._batch is None and not self._waiting) or not self._may_decode():
            return None
        return 0.0 if self._batch is not None else self._admit_in_seconds()

    def _may_decode(self) -> bool:
        return not self._paused and self._version is not None

    def _admit_in_seconds(self) -> float:
        if self._batch is not None and sum(job.request.n_samples for job in self._waiting) >= self._batch.rows:
            return 0.0
        first, last = self._waiting[0].posted_at, self._waiting[-1].posted_at
        idle_until = min(last + GATHER_GAP_SECONDS, first + GATHER_IDLE_SECONDS)
        until = idle_until if self._batch is None else first + GATHER_BUSY_SECONDS
        return max(0.0, until - time.monotonic())

    def _decode_step(self) -> None:
        admits = bool(self._waiting) and self._admit_in_seconds() == 0.0
        if self._one_request_at_a_time and self._batch is not None:
            admits = False
        running = self._advance(self._batch) if self._batch is not None else None
        admitted = self._admit() if admits else None
        batches = [batch for batch in (running, admitted) if batch is not None]
        self._batch = merge(*batches) if len(batches) == 2 else batches[0] if batches else None

    def _admit(self) -> Batch | None:
        """Sample the first token of all waiting requests; each prompt is computed once for all its samples."""
        count = 1 if self._one_request_at_a_time else len(self._waiting)
        jobs, self._waiting = self._waiting[:count], self._waiting[count:]
        owners = range(self._next_owner, self._next_owner + len(jobs))
        self._next_owner += len(jobs)
        self._jobs.update(zip(owners, jobs, strict=True))
        requests = [job.request for job in jobs]
        batch = prompt_batch(
            [request.prompt_ids for request in requests],
            [request.sampling.temperature for request in requests],
            [request.sampling.max_new_tokens for request in requests],
            list(owners),
        )
        logits = next_logits(self._model, batch)
        counts = [request.n_samples for request in requests]
        return self._extend(
            repeat_rows(batch, counts, self._seeds(requests)), logits.repeat_interleave(torch.tensor(counts), 0)
        )

    def _seeds(self, requests: Sequence[GenerateRequest]) -> list[int]:
        seeds: list[int] = []
        for request in requests:
            free = torch.randint(1 << 62, (request.n_samples,), generator=self._generator).tolist()
            seeds += request.seeds or free
        return seeds

    def _advance(self, batch: Batch) -> Batch | None:
        return self._extend(batch, next_logits(self._model, batch))

    def _extend(self, batch: Batch, logits: Tensor) -> Batch | None:
        """Sample a token for each row; rows that end leave. None when all did."""
        if self._version is None:
            raise EngineError("a decode step without verified weights")
        tokens, log_probs = sample_tokens(
            logits, batch.temperature, self._model.vocab_size, uniforms(batch.seed, batch.n_new)
        )
        append_column(batch, tokens, log_probs, self._version)
        stopped = torch.isin(tokens, self._end_ids)
        ended = stopped | (batch.n_new >= batch.max_new)
        if not bool(ended.any()):
            return batch
        self._collect(batch, ended.nonzero().squeeze(1), stopped)
        return None if bool(ended.all()) else select(batch, (~ended).nonzero().squeeze(1))

    def _collect(self, batch: Batch, rows: Tensor, stopped: Tensor | None) -> None:
        """Hand the rows' completions to their jobs; without `stopped` they were aborted."""
        starts = (batch.tokens.shape[1] - batch.n_new[rows]).tolist()
        owners, samples = batch.owner[rows].tolist(), batch.sample[rows].tolist()
        reasons = [FinishReason.ABORT] * len(starts)
        if stopped is not None:
            reasons = [FinishReason.STOP if each else FinishReason.LENGTH for each in stopped[rows].tolist()]
        # Copies of what leaves, once for all rows: a completion is a view that holds on to nothing that decodes on.
        newest = slice(min(starts), None)
        tables = zip(
            batch.tokens[rows, newest].numpy().astype(np.int32),
            batch.log_probs[rows, newest].numpy(),
            batch.versions[rows, newest].numpy(),
            strict=True,
        )
        for start, owner, sample, reason, table in zip(starts, owners, samples, reasons, tables, strict=True):
            new = slice(start - newest.start, None)
            tokens, log_probs, versions = table
            self._jobs[owner].completions[sample] = Completion(tokens[new], log_probs[new], versions[new], reason)
        for owner in set(owners):
            completions = [each for each in self._jobs[owner].completions if each is not None]
            if len(completions) == self._jobs[owner].request.n_samples:
                self._jobs.pop(owner).future.set_result(completions)

    def _abort(self, chosen: Callable[[_Job], bool]) -> None:
        unstarted = [job for job in self._waiting if chosen(job)]
        self._waiting = [job for job in self._waiting if not chosen(job)]
        for job in unstarted:
            job.future.set_result([_nothing() for _ in range(job.request.n_samples)])
        owners = [owner for owner, job in self._jobs.items() if chosen(job)]
        if self._batch is None or not owners:
            return
        leaving = torch.isin(self._batch.owner, torch.tensor(owners))
        self._collect(self._batch, leaving.nonzero().squeeze(1), None)
        self._batch = None if bool(leaving.all()) else select(self._batch, (~leaving).nonzero().squeeze(1))

    def _pause(self, mode: PauseMode) -> None:
        self._paused = True
        if mode is PauseMode.ABORT:
            self._abort(lambda job: True)
        elif mode is PauseMode.RETRACT and self._batch is not None:
            self._batch.cache = None

    def _resume(self) -> None:
        self._paused = False

    def _swap(self, staged: StagedWeights, mode: PauseMode) -> SwapReport:
        check_weights(self._model.module, staged.tensors)
        started = time.perf_counter()
        self._version = None
        difference = 0.0
        try:
            copy_weights(self._model.module, staged.tensors)
            if staged.probe is not None:
                scored = score_sequences(self._model, staged.probe.sequences, staged.probe.temperature)
                difference = staged.probe.check(scored, staged.version)
        except (RuntimeError, ValueError, KeyError):
            self._abort(lambda job: True)
            raise
        if mode is not PauseMode.IN_PLACE and self._batch is not None:
            self._batch.cache = None  # rows stay in the table: leaving and coming back as prompts would be the same
        self._version = staged.version
        return SwapReport(staged.version, time.perf_counter() - started, difference)

    def _fail_everything(self) -> None:
        """Fail all futures, including calls that were posted while the thread ended."""
        jobs = [*self._waiting, *self._jobs.values()]
        self._waiting, self._jobs, self._batch = [], {}, None
        while not self._inbox.empty():
            call = self._inbox.get()
            if call is not None:
                call()
        for job in [*jobs, *self._waiting]:
            if not job.future.done():
                job.future.set_exception(EngineError("the engine has stopped"))


def _nothing() -> Completion:
    return Completion(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int64), FinishReason.ABORT)
