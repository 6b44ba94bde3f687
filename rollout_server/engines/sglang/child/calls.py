"""The calls of the engine's process, each on SGLang's own request objects.

No call relies on an SGLang default: the arguments passed here define the log-probs of the rows.
"""

import asyncio
from typing import Any

import numpy as np
import sglang
import torch
from sglang.srt.managers.io_struct import (
    AbortReq,
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    PauseGenerationReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.utils import MultiprocessingSerializer

from relax_common.failpoints import failpoint
from relax_common.json_types import JsonObject
from relax_common.storage.sealed_memory import Place
from rollout_server.engines.sglang.child.shadow import Shadow
from rollout_server.engines.sglang.sampling import output_of, sampling_params

ABORT_AGAIN_SECONDS = 0.2

Answer = tuple[JsonObject, bytes]
NOTHING: Answer = ({}, b"")


class Refused(ValueError):
    """This request can never be answered."""


class Calls:
    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._running: dict[str, asyncio.Event] = {}
        self._shadow = Shadow()

    def identity(self) -> JsonObject:
        return {
            "sglang": sglang.__version__,
            "device": self._engine.server_args.device,
            "architecture": self._manager.model_config.hf_config.architectures[0],
        }

    async def call(self, header: JsonObject, payload: bytes) -> Answer:
        match header["call"]:
            case "sample":
                return await self._sample(header, payload)
            case "score":
                return await self._score(payload)
            case "abort":
                return await self._abort(header["rids"])
            case "ping":
                await self._manager.get_internal_state()  # through the scheduler's process and back
                return NOTHING
            case "pause":
                await self._manager.pause_generation(PauseGenerationReqInput(mode=header["mode"]))
                return NOTHING
            case "resume":
                await self._manager.continue_generation(ContinueGenerationReqInput())
                return NOTHING
            case "stage":
                await asyncio.to_thread(self._shadow.take, Place(*header["place"]), header["tensors"])
                return NOTHING
            case "load":
                return await self._load(header["version"], header["flush"])
            case unknown:
                raise Refused(f"no call {unknown!r}")

    async def _sample(self, header: JsonObject, payload: bytes) -> Answer:
        rid = header["rid"]
        ended = self._running.setdefault(rid, asyncio.Event())
        try:
            answer = await self._engine.async_generate(
                input_ids=np.frombuffer(payload, np.int32).tolist(),
                sampling_params=sampling_params(
                    header["temperature"], header["max_new_tokens"], header["stop_token_ids"]
                ),
                # A prompt that is only prefilled gets no log-probs: in mixed batches SGLang counts one too many.
                return_logprob=header["max_new_tokens"] > 0,
                logprob_start_len=-1,
                rid=rid,
                cache_salt=header["salt"],
            )
        except ValueError as error:  # SGLang's word for a request that it does not take
            raise Refused(str(error)) from error
        finally:
            del self._running[rid]
            ended.set()
        output = output_of(answer)
        return output.header(), output.payload()

    async def _score(self, payload: bytes) -> Answer:
        """Log-probs at temperature 1 of all tokens but the first; never from cached keys and values."""
        answer = await self._engine.async_generate(
            input_ids=np.frombuffer(payload, np.int32).tolist(),
            sampling_params=sampling_params(1.0, 0, []),
            return_logprob=True,
            logprob_start_len=0,
        )
        scored = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]
        return {}, np.array(scored, np.float32).tobytes()

    async def _abort(self, rids: list[str]) -> Answer:
        """Returns when none of them runs. The abort is repeated, because it may overtake the request that it names."""
        while left := [(rid, self._running[rid]) for rid in rids if rid in self._running]:
            for rid, _ in left:
                self._manager._dispatch_to_scheduler(AbortReq(rid=rid))
            waits = [asyncio.create_task(ended.wait()) for _, ended in left]
            await asyncio.wait(waits, timeout=ABORT_AGAIN_SECONDS)
            for wait in waits:
                wait.cancel()
        return NOTHING

    async def _load(self, version: str, flush: bool) -> Answer:
        """Load the shadow into the live parameters. SGLang overwrites them slice by slice; until the end they are
        mixed."""
        _check(await self._manager.begin_weight_update(BeginWeightUpdateReqInput(selector="all")))
        buckets = list(self._shadow.buckets())
        for index, bucket in enumerate(buckets):
            last = index == len(buckets) - 1
            await self._update(bucket, version if last else None, flush and last)
            failpoint("engine.mid_swap")
        _check(await self._manager.end_weight_update(EndWeightUpdateReqInput()))
        return NOTHING

    async def _update(self, bucket: list[tuple[str, torch.Tensor]], version: str | None, flush: bool) -> None:
        ranks = self._engine.server_args.tp_size
        payloads = [MultiprocessingSerializer.serialize(bucket) for _ in range(ranks)]
        _check(
            await self._manager.update_weights_from_tensor(
                UpdateWeightsFromTensorReqInput(
                    serialized_named_tensors=payloads,
                    flush_cache=flush,
                    abort_all_requests=False,
                    weight_version=version,
                )
            )
        )


def _check(result: tuple[bool, str]) -> None:
    succeeded, message = result
    if not succeeded:
        raise RuntimeError(message)
