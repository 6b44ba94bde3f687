"""What travels on a host socket: frames in any pieces, and peers that are broken or mean harm."""

from __future__ import annotations

import math
import os
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import status_pb2
from host_peers import CALLERS, LOOPS, SECONDS, Caller, Host, Raw, RawServer, error_of, plan, wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import DeadlineExceeded, InvalidInput, RelaxError, Unavailable, from_status
from relax_common.host_calls import wire


@pytest.fixture(params=sorted(LOOPS))
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    made = Host(request.param)
    yield made
    made.close()


@pytest.fixture(params=sorted(CALLERS))
def caller(request: pytest.FixtureRequest, host: Host) -> Iterator[Caller]:
    made = CALLERS[request.param]("uvloop", host.name)
    yield made
    made.close()


def split(content: bytes, at: list[int]) -> list[bytes]:
    cuts = [0, *sorted(min(i, len(content)) for i in at), len(content)]
    return [content[a:b] for a, b in pairwise(cuts) if b > a]


def asks(run: str = "", step: int = 7, seconds: float = 5.0) -> bytes:
    return wire.request_frame(b"GetPlan", pb.GetPlanRequest(run=run, step=step).SerializeToString(), seconds)


def said(frame: bytes) -> RelaxError:
    with pytest.raises(RelaxError) as refused:
        wire.read_answer(frame, pb.GetPlanResponse.FromString)
    return refused.value


def step_of(frame: bytes) -> int:
    answer: pb.GetPlanResponse = wire.read_answer(frame, pb.GetPlanResponse.FromString)
    return answer.plan.step


@given(
    st.lists(st.tuples(st.binary(max_size=300), st.lists(st.integers(0, 330), max_size=20)), min_size=1, max_size=4),
    st.floats(0, 1e6),
)
def test_frames_come_out_whole_however_they_came_in(calls: list[tuple[bytes, list[int]]], seconds: float) -> None:
    asked, answered = wire.Frames(), wire.Frames()
    for message, cuts in calls:
        pieces = split(wire.request_frame(b"GetPlan", message, seconds), cuts)
        frames = [asked.feed(piece) for piece in pieces]
        assert frames[:-1] == [None] * (len(pieces) - 1)
        assert wire.read_request(frames[-1] or b"") == (b"GetPlan", seconds, message)
        pieces = split(wire.answer_frame(message), cuts)
        assert [wire.read_answer(f, bytes) for f in map(answered.feed, pieces) if f is not None] == [message]


@given(st.binary(min_size=1, max_size=40), st.lists(st.integers(0, 40), max_size=8))
def test_whatever_bytes_come_are_a_frame_or_refused(content: bytes, cuts: list[int]) -> None:
    frames = wire.Frames()
    for piece in split(content, cuts):
        try:
            frame = frames.feed(piece)
            if frame is not None:
                wire.read_request(frame)
        except InvalidInput:
            return


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 60), max_size=12))
def test_calls_and_answers_in_any_pieces_on_real_sockets(host: Host, caller: Caller, cuts: list[int]) -> None:
    with closing(Raw(host.name)) as peer:
        for step in (1, 2):
            peer.send(*split(asks(step=step), cuts))
            assert step_of(peer.frame()) == step
    answer = wire.answer_frame(pb.GetPlanResponse(plan=pb.PlanKey(step=1 << 60)).SerializeToString())
    with (
        closing(RawServer(lambda request: split(answer, cuts))) as server,
        closing(type(caller)("uvloop", server.name)) as c,
    ):
        assert [plan(c, 1), plan(c, 1)] == [1 << 60] * 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (struct.pack("<I", wire.FRAME_BYTES_MAX), "announced, at most"),
        (struct.pack("<I", 0), "announced, at most"),
        (b"GET / HTTP/1.1\r\n\r\n", "announced, at most"),
        (struct.pack("<IB", 1, 0), "a call of 5 bytes came"),
        (struct.pack("<IdB", 9, 1.0, 200), "a name of 200 bytes came in 13"),
        (asks() + b"x", "1 bytes came behind a frame"),
        (asks() + asks(), "bytes came behind a frame"),
        (struct.pack("<IdB", 9, math.nan, 0), "may take nan s"),
        (struct.pack("<IdB", 9, math.inf, 0), "may take inf s"),
        (struct.pack("<IdB", 9, -1.0, 0), "may take -1.0 s"),
    ],
    ids=["too large", "empty", "http", "short", "name", "trailing", "two at once", "nan", "inf", "negative"],
)
def test_what_is_no_call_is_refused_and_hung_up_on_and_disturbs_nobody(
    host: Host, caller: Caller, content: bytes, words: str
) -> None:
    waiting = caller.begin("GetPlan", pb.GetPlanRequest(run="wait"))
    served = host.servicer.served
    with closing(Raw(host.name)) as peer:
        peer.send(content)
        refused = said(peer.frame())
        assert isinstance(refused, InvalidInput)
        assert words in refused.message
        assert peer.frame() == b""
    assert host.servicer.served == served
    assert plan(caller, 7) == 7
    assert not waiting.done()


def test_a_call_before_the_answer_to_the_one_before_it_ends_both(host: Host) -> None:
    cancelled, begun = host.servicer.cancelled, host.servicer.begun
    with closing(Raw(host.name)) as peer:
        peer.send(asks("wait"))
        wait_until(lambda: host.servicer.begun == begun + 1, "the call")
        peer.send(asks())
        assert "came before the one before it" in said(peer.frame()).message
        assert peer.frame() == b""
    wait_until(lambda: host.servicer.cancelled == cancelled + 1, "the cancellation")


def test_methods_that_are_unknown_or_streams_and_broken_messages_are_refused_and_the_next_call_is_served(
    host: Host,
) -> None:
    with closing(Raw(host.name)) as peer:
        for method in (b"Nonsense", b"", b"\xff\xfe", b"ReadRows", b"Put", b"unary_unary"):
            peer.send(wire.request_frame(method, b"", 5.0))
            refused = said(peer.frame())
            assert refused.code is grpc.StatusCode.NOT_FOUND
            assert "is not among this service's unary methods" in refused.message
        peer.send(wire.request_frame(b"GetPlan", b"\xff\xff\xff", 5.0))
        broken = said(peer.frame())
        assert isinstance(broken, InvalidInput)
        assert "3 bytes came that are no message of this method" in broken.message
        peer.send(asks(step=9))
        assert step_of(peer.frame()) == 9


def test_a_peer_that_hangs_up_cancels_its_call_and_half_a_call_is_forgotten(host: Host) -> None:
    cancelled, connections = host.servicer.cancelled, host.n_connections
    begun = host.servicer.begun
    peers = [Raw(host.name) for _ in range(20)]
    for peer in peers:
        peer.send(asks("wait"))
    halves = [Raw(host.name) for _ in range(20)]
    for i, peer in enumerate(halves):
        peer.send(asks()[: i + 1])
    wait_until(lambda: host.servicer.begun == begun + 20, "the calls")
    for peer in (*peers, *halves):
        peer.close()
    wait_until(lambda: host.servicer.cancelled == cancelled + 20, "the cancellations")
    wait_until(lambda: host.n_connections == connections, "the end of the connections")
    assert host.servicer.begun == begun + 20


def test_a_peer_that_does_not_read_its_answers_gets_no_more_of_them(host: Host) -> None:
    request = wire.request_frame(b"FetchRows", pb.FetchRowsRequest(session=1 << 20).SerializeToString(), 5.0)
    with closing(Raw(host.name)) as peer, closing(Raw(host.name)) as other:
        for i in range(8):
            peer.send(request)
            other.send(asks(step=i))
            assert step_of(other.frame()) == i, "each is looked at before the next one comes"
        assert host.servicer.served - 8 <= 2
        assert len(peer.frame()) > 1 << 20


def test_a_server_without_descriptors_serves_whom_it_has_and_the_others_once_there_are_some(
    host: Host, caller: Caller
) -> None:
    assert plan(caller, 7) == 7
    late = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(5)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        for peer in late:
            peer.connect("\0" + host.name)
            peer.sendall(asks())
        for step in range(20):
            assert plan(caller, step) == step
        assert host.n_connections == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for peer in late:
        peer.settimeout(SECONDS)
        assert peer.recv(1 << 16)
        peer.close()


@pytest.mark.parametrize(
    ("pieces", "kind", "words"),
    [
        ([], Unavailable, "hung up"),
        ([b"\0"], DeadlineExceeded, "was not answered"),
        ([struct.pack("<I", wire.FRAME_BYTES_MAX)], Unavailable, "was announced"),
        ([b"HTTP/1.1 400 Bad Request\r\n"], Unavailable, "was announced"),
        ([wire.answer_frame(b"") * 2], Unavailable, "came behind a frame"),
        ([wire.answer_frame(b"\xff\xff")], RelaxError, "neither a message nor a status"),
        ([struct.pack("<IB", 3, 1) + b"\xff\xff"], RelaxError, "neither a message nor a status"),
        ([struct.pack("<IB", 3, 7) + b"\xff\xff"], RelaxError, "neither a message nor a status"),
    ],
    ids=["hangs up", "half", "too large", "http", "two at once", "message", "status", "kind"],
)
def test_a_broken_server_is_an_error_of_the_call(
    caller: Caller, pieces: list[bytes], kind: type[RelaxError], words: str
) -> None:
    with closing(RawServer(lambda request: pieces)) as server, closing(type(caller)("uvloop", server.name)) as c:
        for _ in range(2):
            error = error_of(c.begin("GetPlan", pb.GetPlanRequest(), 0.1 if kind is DeadlineExceeded else SECONDS))
            assert (type(error), words in error.message) == (kind, True)


def test_a_status_of_an_unknown_code_or_with_broken_details_is_an_error_all_the_same() -> None:
    assert from_status(status_pb2.Status(code=99, message="odd")).message == "odd"
    broken = AnyMessage(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff")
    frame = status_pb2.Status(code=5, message="gone", details=[broken]).SerializeToString()
    assert "neither" in said(struct.pack("<IB", 1 + len(frame), 1) + frame).message
