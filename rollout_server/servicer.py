"""relax.rollout.v1: what a person or relaxd may ask of a running server."""

import asyncio
import uuid

from relax.common.v1 import common_pb2
from relax.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from relax_common.errors import DeadlineExceeded, InvalidInput, Unavailable
from relax_common.rpc.calls import ServicerContext
from rollout_server.assignment import Work
from rollout_server.engines.contract import (
    Completion,
    EngineError,
    GenerateRequest,
    PauseMode,
    RequestRefused,
    SamplingParams,
)
from rollout_server.serving_state import ServingState
from rollout_server.tokenizers import PromptError

GENERATE_SECONDS = 120.0
PROMPTS_MAX = 1000
CHARACTERS_MAX = 1 << 18
"""A call is for looking at the model; a larger one would hold up the groups that are being generated."""
PAUSE_MODES = {
    rollout_pb2.PAUSE_MODE_IN_PLACE: PauseMode.IN_PLACE,
    rollout_pb2.PAUSE_MODE_RETRACT: PauseMode.RETRACT,
    rollout_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
}
SERVING_STATES = {
    ServingState.UNVERIFIED: rollout_pb2.SERVING_STATE_UNVERIFIED,
    ServingState.SERVING: rollout_pb2.SERVING_STATE_SERVING,
    ServingState.STAGING: rollout_pb2.SERVING_STATE_STAGING,
}


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers UNAVAILABLE to everything but GetStatus until the server has its assignment."""

    def __init__(self, identity: common_pb2.Identity) -> None:
        self._identity = identity
        self.work: Work | None = None

    async def GetStatus(
        self, request: rollout_pb2.GetStatusRequest, context: ServicerContext
    ) -> rollout_pb2.GetStatusResponse:
        response = rollout_pb2.GetStatusResponse(
            identity=self._identity,
            serving=rollout_pb2.SERVING_STATE_UNVERIFIED,
            waits_for="an assignment from relaxd",
        )
        work = self.work
        if work is None:
            return response
        serving, health = work.follower.serving, work.engine.health()
        response.run, response.term = work.run, work.term
        response.serving = SERVING_STATES[serving.state]
        if serving.served is not None:
            response.version.CopyFrom(serving.served.to_proto())
        response.groups_in_flight = work.groups.groups_in_flight
        response.samples_in_flight = health.running_samples + health.waiting_samples
        response.tokens_generated = work.groups.tokens_generated
        response.waits_for = work.waits_for
        response.draining = work.groups.draining
        response.engine, response.engine_restarts = health.detail, health.restarts
        return response

    async def Drain(self, request: rollout_pb2.DrainRequest, context: ServicerContext) -> rollout_pb2.DrainResponse:
        return rollout_pb2.DrainResponse(groups_returned=await self._require().groups.drain(request.grace_seconds))

    async def Pause(self, request: rollout_pb2.PauseRequest, context: ServicerContext) -> rollout_pb2.PauseResponse:
        if request.mode not in PAUSE_MODES:
            raise InvalidInput("mode is not set: choose PAUSE_MODE_IN_PLACE, PAUSE_MODE_RETRACT or PAUSE_MODE_ABORT")
        await asyncio.wrap_future(self._require().engine.pause(PAUSE_MODES[request.mode]))
        return rollout_pb2.PauseResponse()

    async def Resume(self, request: rollout_pb2.ResumeRequest, context: ServicerContext) -> rollout_pb2.ResumeResponse:
        self._require().engine.resume()
        return rollout_pb2.ResumeResponse()

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: ServicerContext
    ) -> rollout_pb2.GenerateResponse:
        work = self._require()
        sampling = SamplingParams(request.temperature, request.max_new_tokens)
        if len(request.prompts) > PROMPTS_MAX or sum(map(len, request.prompts)) > CHARACTERS_MAX:
            raise InvalidInput(f"one call takes at most {PROMPTS_MAX} prompts of {CHARACTERS_MAX} characters in all")
        ids = [uuid.uuid4().hex for _ in request.prompts]
        try:
            futures = [
                work.engine.generate(GenerateRequest(id_, work.tokenizer.encode_prompt(prompt), 1, sampling))
                for id_, prompt in zip(ids, request.prompts, strict=True)
            ]
            answers = await asyncio.wait_for(asyncio.gather(*map(asyncio.wrap_future, futures)), GENERATE_SECONDS)
        except (PromptError, RequestRefused) as error:
            raise InvalidInput(str(error)) from error
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer within {GENERATE_SECONDS:.0f} s; {work.waits_for}") from error
        except EngineError as error:
            raise Unavailable(str(error)) from error
        finally:
            # The caller may have gone away; a request that has ended is not affected.
            for id_ in ids:
                work.engine.abort(id_)
        return rollout_pb2.GenerateResponse(generations=[_generation(work, answer[0]) for answer in answers])

    def _require(self) -> Work:
        if self.work is None:
            raise Unavailable("this rollout server has no assignment from relaxd yet")
        return self.work


def _generation(work: Work, completion: Completion) -> rollout_pb2.Generation:
    token_ids = completion.token_ids.tolist()
    return rollout_pb2.Generation(
        text=work.tokenizer.decode_responses([token_ids])[0],
        tokens=token_ids,
        log_probs=completion.log_probs.tolist(),
        finish_reason=completion.finish_reason,
        versions=completion.versions.tolist(),
    )
