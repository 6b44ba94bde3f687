"""Calls over a socket of the host: answers and errors as by gRPC, deadlines, who hangs up, closing, many at once."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import grpc
import pytest
from host_peers import (
    CALLERS,
    LOOPS,
    SECONDS,
    SERVICE,
    Caller,
    Host,
    RawServer,
    Tasks,
    Threads,
    error_of,
    plan,
    wait_until,
)

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import (
    AlreadyExists,
    CallFailed,
    DataLoss,
    DeadlineExceeded,
    Exhausted,
    InvalidInput,
    NotFound,
    Precondition,
    RelaxError,
    StaleTerm,
    Unavailable,
)
from relax_common.host_calls import wire
from relax_common.host_calls.stub import CONNECTIONS_MAX, HostStub


@pytest.fixture(params=sorted(LOOPS))
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    made = Host(request.param)
    yield made
    made.close()


@pytest.fixture(params=sorted(CALLERS))
def caller(request: pytest.FixtureRequest, host: Host) -> Iterator[Caller]:
    made = CALLERS[request.param]("uvloop" if "uvloop" in type(host.loop.loop).__module__ else "asyncio", host.name)
    yield made
    made.close()


def rows(n_bytes: int, back: int | None = None) -> pb.FetchRowsRequest:
    """Asks for the same bytes back, or for `back` zeros."""
    return pb.FetchRowsRequest(closed_views=os.urandom(n_bytes), session=back or 0)


def in_progress(host: Host, caller: Caller, n: int = 1) -> list[Future[Any]]:
    begun = host.servicer.begun
    calls = [caller.begin("GetPlan", pb.GetPlanRequest(run="wait")) for _ in range(n)]
    wait_until(lambda: host.servicer.begun == begun + n, "the calls")
    return calls


def test_calls_one_after_another_use_one_connection(host: Host, caller: Caller) -> None:
    assert [plan(caller, step) for step in range(20)] == list(range(20))
    assert host.n_connections == 1


@pytest.mark.parametrize("n_bytes", [0, 1, 70_000, 1 << 20, 20 << 20])
def test_messages_of_any_size_go_both_ways(host: Host, caller: Caller, n_bytes: int) -> None:
    request = rows(n_bytes)
    answer = caller.begin("FetchRows", request).result(SECONDS)
    assert answer.extent == request.closed_views
    assert plan(caller, 7) == 7


def test_a_message_that_is_too_large_is_refused_on_either_side_and_not_repeated(host: Host, caller: Caller) -> None:
    large = wire.FRAME_BYTES_MAX
    asked = error_of(caller.begin("FetchRows", pb.FetchRowsRequest(closed_views=bytes(large))))
    assert (type(asked), host.servicer.served) == (Exhausted, 0)
    answered = error_of(caller.begin("FetchRows", rows(0, back=large)))
    assert (type(answered), host.servicer.served) == (Exhausted, 1)
    assert plan(caller, 7) == 7


def test_errors_arrive_with_their_type_reason_and_details(host: Host, caller: Caller) -> None:
    errors = host.servicer.errors
    errors["stale"] = StaleTerm("term 1 is over")
    errors["missing"] = NotFound("no such group", reason="NO_GROUP", details={"group": "g7", "run": "r"})
    for cls in (
        InvalidInput,
        NotFound,
        AlreadyExists,
        Precondition,
        Exhausted,
        Unavailable,
        DeadlineExceeded,
        DataLoss,
    ):
        errors[cls.__name__] = cls("a reason\nof two lines", reason="REASON")
    for name, sent in errors.items():
        found = error_of(caller.begin("GetPlan", pb.GetPlanRequest(run=name)))
        assert isinstance(sent, RelaxError)
        assert type(found) is type(sent)
        assert (found.message, found.reason, found.details) == (sent.message, sent.reason, sent.details)
    assert isinstance(CallFailed(Precondition("x")), grpc.RpcError)
    assert host.n_connections == 1


def test_an_exception_of_a_handler_is_an_internal_error_and_the_connection_goes_on(host: Host, caller: Caller) -> None:
    host.servicer.errors["broken"] = ZeroDivisionError("division by zero")
    found = error_of(caller.begin("GetPlan", pb.GetPlanRequest(run="broken")))
    assert (found.code, found.message) == (grpc.StatusCode.INTERNAL, "ZeroDivisionError: division by zero")
    assert plan(caller, 7) == 7
    assert host.n_connections == 1


def test_a_handler_that_is_cancelled_from_inside_leaves_nobody_waiting(host: Host, caller: Caller) -> None:
    host.servicer.errors["cancelled"] = asyncio.CancelledError()
    assert isinstance(error_of(caller.begin("GetPlan", pb.GetPlanRequest(run="cancelled"))), Unavailable)
    assert plan(caller, 7) == 7


def test_a_deadline_holds_cancels_the_handler_and_the_next_call_gets_its_own_answer(host: Host, caller: Caller) -> None:
    found = error_of(caller.begin("GetPlan", pb.GetPlanRequest(run="wait"), 0.2))
    assert isinstance(found, DeadlineExceeded)
    assert "GetPlan was not answered within 0.2 s" in found.message
    assert 0.0 < host.servicer.left[0] <= 0.2
    wait_until(lambda: host.servicer.cancelled == 1, "the cancellation")
    assert isinstance(error_of(caller.begin("GetPlan", pb.GetPlanRequest(), 0.0)), DeadlineExceeded)
    assert plan(caller, 7) == 7
    wait_until(lambda: host.n_connections == 1, "one connection")


def test_answers_at_about_the_deadline_are_never_taken_for_those_of_later_calls(host: Host, caller: Caller) -> None:
    late = 0
    for step in range(1, 150):
        request = pb.GetPlanRequest(run="soon", step=step, chunk=2000 + 20 * (step % 50))
        try:
            assert caller.begin("GetPlan", request, 0.0025).result(SECONDS).plan.step == step
        except CallFailed as error:
            late += isinstance(error.error, DeadlineExceeded)
        assert plan(caller, 1000 + step) == 1000 + step
    assert late
    wait_until(lambda: host.n_connections == 1, "one connection")


def test_a_cancelled_task_cancels_its_handler_and_no_later_call_gets_its_answer(host: Host) -> None:
    caller = Tasks("uvloop", host.name)
    (waiting,) = in_progress(host, caller)
    waiting.cancel()
    wait_until(lambda: host.servicer.cancelled == 1, "the cancellation")

    async def cancelled_after(step: int) -> None:
        request = pb.GetPlanRequest(run="soon", step=step, chunk=100)
        call = asyncio.ensure_future(caller.stub.GetPlan(request, timeout=SECONDS))
        await asyncio.sleep(step * 5e-6)
        call.cancel()
        await asyncio.wait({call})
        answer = await caller.stub.GetPlan(pb.GetPlanRequest(step=1000 + step), timeout=SECONDS)
        assert answer.plan.step == 1000 + step

    for step in range(150):
        caller.loop.do(cancelled_after(step))
    wait_until(lambda: host.n_connections <= 1, "one connection")
    caller.close()


def test_closing_a_client_ends_its_calls_at_once_and_takes_no_more(host: Host, caller: Caller) -> None:
    calls = in_progress(host, caller, 3)
    plan(caller, 7)
    caller.close_stub()
    assert all(isinstance(error_of(call), Unavailable) for call in calls)
    wait_until(lambda: host.n_connections == 0, "the end of all connections")
    assert host.servicer.cancelled == 3
    assert "the client is closed" in error_of(caller.begin("GetPlan", pb.GetPlanRequest())).message


def test_a_client_that_closes_while_it_connects_does_not_call(host: Host) -> None:
    caller = Tasks("uvloop", host.name)

    async def close_at_once() -> None:
        call = asyncio.ensure_future(caller.stub.GetPlan(pb.GetPlanRequest(run="wait"), timeout=SECONDS))
        await asyncio.sleep(0)
        caller.stub.close()
        with pytest.raises(CallFailed):
            await call

    caller.loop.do(close_at_once())
    caller.close()
    wait_until(lambda: host.n_connections == 0, "the end of all connections")
    assert host.servicer.begun == host.servicer.cancelled


def test_a_server_that_closes_cancels_its_handlers_and_callers_find_it_unavailable(host: Host, caller: Caller) -> None:
    calls = in_progress(host, caller, 3)
    plan(caller, 7)

    def close() -> int:
        host.server.close()
        return sum(task.cancelling() for task in asyncio.all_tasks(host.loop.loop))

    assert host.loop.call(close) == 3, "cancelled before anything else runs"
    assert all(isinstance(error_of(call), Unavailable) for call in calls)
    assert host.servicer.cancelled == 3
    for _ in range(2):  # over a connection that was kept, and over a new one
        assert isinstance(error_of(caller.begin("GetPlan", pb.GetPlanRequest())), Unavailable)
    again = Host("uvloop")
    other = type(caller)("uvloop", again.name)
    assert again.name != host.name
    assert plan(other, 7) == 7
    other.close()
    again.close()


def test_many_at_once_on_one_client_get_their_own_answers_on_few_connections(host: Host, caller: Caller) -> None:
    waiting = in_progress(host, caller, CONNECTIONS_MAX - 2)
    for first in range(0, 600, 200):
        steps = range(first, first + 200)
        calls = [caller.begin("GetPlan", pb.GetPlanRequest(step=s, run="soon", chunk=100)) for s in steps]
        assert [call.result(SECONDS).plan.step for call in calls] == list(steps)
    assert len(caller.stub._idle) + len(caller.stub._busy) == CONNECTIONS_MAX, "what is beyond goes another way"
    caller.close_stub()
    for call in waiting:
        assert isinstance(error_of(call), Unavailable)


def test_a_server_that_takes_no_more_connections_is_unavailable_and_holds_nobody_up() -> None:
    listener = RawServer(lambda request: [])
    busy = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    busy.bind("\0relax-test-busy-" + listener.name)
    busy.listen(0)
    queued = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    queued.connect(busy.getsockname().decode())
    for caller in (Threads("", listener.name), Tasks("uvloop", listener.name), Tasks("asyncio", listener.name)):
        caller.stub._address = busy.getsockname().decode()
        assert isinstance(error_of(caller.begin("GetPlan", pb.GetPlanRequest(), 1.0)), Unavailable | DeadlineExceeded)
        caller.close()
    queued.close()
    busy.close()
    listener.close()


def test_calls_that_fail_in_any_way_leave_no_descriptor_on_either_side(host: Host, caller: Caller) -> None:
    plan(caller, 7)
    before = len(os.listdir("/proc/self/fd"))
    for step in range(30):
        plan(caller, step)
        error_of(caller.begin("GetPlan", pb.GetPlanRequest(run="wait"), 0.001))
        refused = HostStub(SERVICE, host.name + "-", None)
        with pytest.raises(CallFailed, match="refused"):
            refused.GetPlan(pb.GetPlanRequest(), timeout=1.0)  # type: ignore[attr-defined]
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, "the descriptors")
