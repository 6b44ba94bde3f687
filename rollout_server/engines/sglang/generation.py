"""Requests through the engine: a group's prompt once, then each sample alone, interrupted and continued by swaps."""

import asyncio
import uuid
from collections.abc import Callable, Sequence

from rollout_server.engines.contract import Completion, GenerateRequest
from rollout_server.engines.sglang.backend import Backend, BackendLost, SampleCall
from rollout_server.engines.sglang.gate import Gate
from rollout_server.engines.sglang.jobs import ForeignWeights, Job, Sample, nothing
from rollout_server.engines.sglang.sampling import SampleOutput


class Generation:
    """Every sample is a separate request in the engine, so that it can be interrupted and continued alone."""

    def __init__(self, backend: Backend, gate: Gate, end_ids: Sequence[int]) -> None:
        self._backend = backend
        self._gate = gate
        self._end_ids = list(end_ids)
        self._jobs: list[Job] = []
        self._in_flight: dict[str, Job] = {}
        self.running_samples = 0

    @property
    def unfinished_samples(self) -> int:
        return sum(job.request.n_samples for job in list(self._jobs))

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        job = Job(request)
        self._jobs.append(job)
        try:
            if request.n_samples > 1:
                await self._prefill(job)
            return list(await asyncio.gather(*(self._sample(job) for _ in range(request.n_samples))))
        finally:
            self._jobs.remove(job)

    async def abort(self, chosen: Callable[[Job], bool]) -> None:
        """The chosen jobs end with the tokens they have."""
        for job in self._jobs:
            job.aborted = job.aborted or chosen(job)
        await self._gate.notify()
        await self._abort_in_flight([rid for rid, job in self._in_flight.items() if job.aborted])

    async def collect(self) -> None:
        """Take every sample out of the engine; each waits at the gate with its tokens and continues from there."""
        await self._abort_in_flight(list(self._in_flight))

    async def discard(self) -> None:
        """All jobs end empty: what is in the engine came from weights that are not trusted."""
        for job in self._jobs:
            job.aborted = job.void = True
        await self.abort(lambda job: True)

    async def end_all(self) -> None:
        """The engine is lost: all jobs end with the tokens that the adapter has received."""
        for job in self._jobs:
            job.aborted = True
        await self._gate.notify()

    async def _abort_in_flight(self, rids: Sequence[str]) -> None:
        if rids:
            await self._backend.abort(rids)

    async def _prefill(self, job: Job) -> None:
        """Prefill the prompt: its keys and values stay in the prefix cache for the samples that follow."""
        if await self._gate.enter(job):
            await self._call(job, job.request.prompt_ids, 0)

    async def _sample(self, job: Job) -> Completion:
        sample = Sample(list(job.request.prompt_ids), job.request.sampling.max_new_tokens)
        while not sample.ended and await self._gate.enter(job):
            self.running_samples += 1
            try:
                output = await self._call(job, sample.so_far(), sample.max_new_tokens - sample.n_new)
            finally:
                self.running_samples -= 1
            await self._gate.verified.wait()
            if output is None or job.void:
                break
            try:
                sample.take(output, self._gate.loaded)
            except ForeignWeights as error:
                job.void = True
                await self._backend.discard(str(error))
        return nothing() if job.void else sample.completion()

    async def _call(self, job: Job, prompt_ids: Sequence[int], max_new_tokens: int) -> SampleOutput | None:
        """Returns None if the engine was lost during the call."""
        rid = uuid.uuid4().hex
        sampling = job.request.sampling
        call = SampleCall(
            rid, prompt_ids, sampling.temperature, max_new_tokens, self._end_ids, salt=str(self._gate.version)
        )
        self._in_flight[rid] = job
        try:
            return await self._backend.sample(call)
        except BackendLost:
            job.aborted = True
            return None
        finally:
            del self._in_flight[rid]
