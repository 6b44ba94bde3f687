"""Answers that travel while they become true: read at once, counted only when the handler stands by them."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from host_peers import CALLERS, LOOPS, SECONDS, Caller, Host, RawServer, Servicer, Threads, error_of, plan, wait_until
from hypothesis import given
from hypothesis import strategies as st

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import Precondition, RelaxError, Unavailable
from relax_common.host_calls import wire
from relax_common.host_calls.server import answer_early


class Early(Servicer):
    """Answers GetPlan early and stands by it once `durable` is set; a run may be named for what happens instead."""

    def __init__(self) -> None:
        super().__init__()
        self.durable = asyncio.Event()
        self.sent = 0

    async def GetPlan(self, request: pb.GetPlanRequest, context: Any) -> pb.GetPlanResponse:
        answer = pb.GetPlanResponse(plan=pb.PlanKey(step=request.step))
        answer_early(context, answer)
        self.sent += 1
        await self.durable.wait()
        if request.run in self.errors:
            raise self.errors[request.run]
        return pb.GetPlanResponse() if request.run == "other" else answer


@pytest.fixture(params=sorted(LOOPS))
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    made = Host(request.param, Early)
    yield made
    made.close()


@pytest.fixture(params=sorted(CALLERS))
def caller(request: pytest.FixtureRequest, host: Host) -> Iterator[Caller]:
    made = CALLERS[request.param]("uvloop", host.name)
    yield made
    made.close()


def asked(host: Host, caller: Caller, run: str = "", step: int = 7) -> Future[Any]:
    """A call whose early answer is on its way."""
    before = host.servicer.sent
    call = caller.begin("GetPlan", pb.GetPlanRequest(run=run, step=step))
    wait_until(lambda: host.servicer.sent > before, "the early answer")
    return call


def stand(host: Host) -> None:
    host.loop.call(host.servicer.durable.set)


def test_an_early_answer_counts_when_its_handler_returns_it_and_not_before(host: Host, caller: Caller) -> None:
    call = asked(host, caller)
    with pytest.raises(TimeoutError):
        call.result(0.05)
    stand(host)
    assert call.result(SECONDS).plan.step == 7
    assert [plan(caller, step) for step in range(5)] == list(range(5))
    assert host.n_connections == 1


def test_what_comes_early_is_read_while_it_becomes_true(host: Host) -> None:
    threads, read = Threads("asyncio", host.name), threading.Event()

    def then(answer: pb.GetPlanResponse) -> int:
        read.set()
        return answer.plan.step

    made: Future[int] = Future()
    request = pb.GetPlanRequest(step=9)
    caller = threading.Thread(target=lambda: made.set_result(threads.stub.GetPlan(request, timeout=SECONDS, then=then)))
    caller.start()
    assert read.wait(SECONDS)
    assert not made.done()
    stand(host)
    assert made.result(SECONDS) == 9
    caller.join()
    threads.close()


@pytest.mark.parametrize("run", ["refused", "broken", "other"])
def test_a_server_that_cannot_stand_by_an_early_answer_hangs_up(host: Host, caller: Caller, run: str) -> None:
    host.servicer.errors = {"refused": Precondition("the disk"), "broken": ZeroDivisionError("division by zero")}
    call = asked(host, caller, run)
    stand(host)
    assert isinstance(error_of(call), Unavailable)
    assert plan(caller, 3) == 3, "over a new connection"


def test_a_server_that_closes_leaves_no_early_answer_standing(host: Host, caller: Caller) -> None:
    call = asked(host, caller)
    host.loop.call(host.server.close)
    assert isinstance(error_of(call), Unavailable)


def test_an_early_answer_may_come_with_its_last_byte_or_be_none() -> None:
    message = pb.GetPlanResponse(plan=pb.PlanKey(step=4)).SerializeToString()
    whole = wire.early_frame(message) + wire.STANDS
    broken = struct.pack("<IB", 4, 2) + b"\xff\xff"
    answers = iter([[whole], [whole[:7], whole[7:-1], whole[-1:]], [broken, wire.STANDS], [whole]])
    server = RawServer(lambda request: next(answers))
    threads = Threads("asyncio", server.name)
    assert [plan(threads, 0), plan(threads, 0)] == [4, 4]
    assert type(error_of(threads.begin("GetPlan", pb.GetPlanRequest()))) is RelaxError
    assert plan(threads, 0) == 4
    threads.close()
    server.close()


@given(st.binary(max_size=300), st.lists(st.integers(0, 330), max_size=6))
def test_an_early_frame_is_known_by_all_but_its_last_byte(message: bytes, cuts: list[int]) -> None:
    content, frames = wire.early_frame(message), wire.Frames()
    ends = sorted({min(i, len(content)) for i in cuts} - {0, len(content)})
    for begin, end in zip([0, *ends], [*ends, len(content)], strict=True):
        assert frames.early() is None
        assert frames.feed(content[begin:end]) is None
    early = frames.early()
    assert early is not None
    assert wire.read_answer(early, bytes) == message
    assert frames.feed(wire.STANDS) == early
