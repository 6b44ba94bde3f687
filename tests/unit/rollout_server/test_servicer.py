"""What a caller of a rollout server may ask for, and what is left when it goes away."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from relax.common.v1 import common_pb2
from relax.rollout.v1 import rollout_pb2
from relax_common.errors import InvalidInput
from relax_common.rpc.portal import promise
from rollout_server.engines.contract import GenerateRequest
from rollout_server.servicer import CHARACTERS_MAX, PROMPTS_MAX, RolloutServicer


class SilentEngine:
    """Answers nothing."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.aborted: list[str] = []
        self.futures: list[Future[Any]] = []

    def generate(self, request: GenerateRequest) -> Future[Any]:
        self.asked.append(request.request_id)
        self.futures.append(promise())
        return self.futures[-1]

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


def servicer_of(engine: SilentEngine) -> RolloutServicer:
    servicer = RolloutServicer(common_pb2.Identity())
    work: Any = SimpleNamespace(engine=engine, tokenizer=SimpleNamespace(encode_prompt=lambda prompt: [1]))
    servicer.work = work
    return servicer


def test_requests_of_a_caller_that_goes_away_are_aborted_and_may_still_be_answered() -> None:
    async def story() -> None:
        engine = SilentEngine()
        request = rollout_pb2.GenerateRequest(prompts=["a", "b"], temperature=1.0, max_new_tokens=2)
        context: Any = None
        call = asyncio.create_task(servicer_of(engine).Generate(request, context))
        while len(engine.asked) < 2:
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        assert engine.aborted == engine.asked
        for future in engine.futures:
            future.set_result([])

    asyncio.run(story())


@pytest.mark.parametrize("prompts", [["a"] * (PROMPTS_MAX + 1), ["a" * (CHARACTERS_MAX + 1)]])
def test_a_call_that_would_hold_up_the_groups_is_refused(prompts: list[str]) -> None:
    engine = SilentEngine()
    context: Any = None
    request = rollout_pb2.GenerateRequest(prompts=prompts, temperature=1.0, max_new_tokens=2)
    with pytest.raises(InvalidInput, match="one call takes at most"):
        asyncio.run(servicer_of(engine).Generate(request, context))
    assert engine.asked == []
