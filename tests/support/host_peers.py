"""Real host servers on event loops in threads, and callers of both kinds, for tests of relax_common.host_calls."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import uvloop

from relax.queue.v1 import queue_pb2 as pb
from relax.queue.v1 import queue_pb2_grpc
from relax_common.errors import CallFailed, RelaxError
from relax_common.host_calls.aio_stub import AioHostStub
from relax_common.host_calls.server import HostServer
from relax_common.host_calls.stub import HostStub

SERVICE = pb.DESCRIPTOR.services_by_name["QueueService"]
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
SECONDS = 20.0


def wait_until(ready: Callable[[], object], what: str, seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"{what} never came"
        time.sleep(0.002)


class Servicer(queue_pb2_grpc.QueueServiceServicer):
    """GetPlan does what the run's name says; FetchRows gives its bytes back, or as many as the session's number."""

    def __init__(self) -> None:
        self.errors: dict[str, BaseException] = {}
        self.served = 0
        self.begun = 0
        self.cancelled = 0
        self.left: list[float] = []
        self.go_on: asyncio.Event | None = None

    async def GetPlan(self, request: pb.GetPlanRequest, context: Any) -> pb.GetPlanResponse:
        self.begun += 1
        self.left.append(context.time_remaining())
        if request.run in self.errors:
            raise self.errors[request.run]
        try:
            if request.run == "wait":
                await asyncio.sleep(SECONDS)
            elif request.run == "soon":
                await asyncio.sleep(request.chunk / 1e6)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.served += 1
        return pb.GetPlanResponse(plan=pb.PlanKey(step=request.step))

    async def FetchRows(self, request: pb.FetchRowsRequest, context: Any) -> pb.FetchRowsResponse:
        self.served += 1
        return pb.FetchRowsResponse(size_bytes=self.served, extent=bytes(request.session) or request.closed_views)


class Loop:
    """An event loop in a thread."""

    def __init__(self, kind: str) -> None:
        self.loop = LOOPS[kind]()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def begin(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def do(self, work: Any) -> Any:
        return self.begin(work).result(SECONDS)

    def call(self, work: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return work()

        return self.do(run())

    def close(self) -> None:
        async def drain() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self.do(drain())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(SECONDS)
        self.loop.close()


class Host:
    """A HostServer with its loop."""

    def __init__(self, kind: str, servicer: type[Servicer] = Servicer) -> None:
        self.loop = Loop(kind)
        self.servicer = servicer()
        self.server = HostServer("relax-test")
        self.name = self.server.name
        queue_pb2_grpc.add_QueueServiceServicer_to_server(self.servicer, self.server)
        self.loop.do(self.server.start())

    @property
    def n_connections(self) -> int:
        return len(self.server._connections)

    def close(self) -> None:
        self.loop.call(self.server.close)
        self.loop.close()


def stubs(kind: type[Any], name: str) -> list[Any]:
    """Each takes what is beyond the connections of the next, in the place of gRPC's stub."""
    made = [None]
    for _ in range(16):
        made.append(kind(SERVICE, name, made[-1]))
    return made[1:]


class Threads:
    """Calls from threads."""

    def __init__(self, kind: str, name: str) -> None:
        self._pool = ThreadPoolExecutor(64)
        self._stubs = stubs(HostStub, name)
        self.stub = self._stubs[-1]

    def begin(self, method: str, request: Any, seconds: float = SECONDS) -> Future[Any]:
        return self._pool.submit(lambda: getattr(self.stub, method)(request, timeout=seconds))

    def close_stub(self) -> None:
        for stub in self._stubs:
            stub.close()

    def close(self) -> None:
        self.close_stub()
        self._pool.shutdown()


class Tasks:
    """Calls from tasks of an event loop."""

    def __init__(self, kind: str, name: str) -> None:
        self.loop = Loop(kind)
        self._stubs = stubs(AioHostStub, name)
        self.stub = self._stubs[-1]

    def begin(self, method: str, request: Any, seconds: float = SECONDS) -> Future[Any]:
        return self.loop.begin(getattr(self.stub, method)(request, timeout=seconds))

    def close_stub(self) -> None:
        for stub in self._stubs:
            self.loop.call(stub.close)

    def close(self) -> None:
        self.close_stub()
        self.loop.close()


Caller = Threads | Tasks
CALLERS: dict[str, type[Threads] | type[Tasks]] = {"threads": Threads, "tasks": Tasks}


def plan(caller: Caller, step: int, run: str = "", seconds: float = SECONDS, chunk: int = 0) -> int:
    """The step that came back."""
    request = pb.GetPlanRequest(run=run, step=step, chunk=chunk)
    answer: pb.GetPlanResponse = caller.begin("GetPlan", request, seconds).result(SECONDS)
    return answer.plan.step


def error_of(call: Future[Any]) -> RelaxError:
    error = call.exception(SECONDS)
    assert isinstance(error, CallFailed), repr(error)
    return error.error


class Raw:
    """A peer that sends whatever it likes."""

    def __init__(self, name: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(SECONDS)
        self.socket.connect("\0" + name)

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.socket.sendall(piece)

    def frame(self) -> bytes:
        """The next frame; b"" where the other side hung up."""
        head = self._exactly(4)
        return head + self._exactly(struct.unpack("<I", head)[0]) if head else b""

    def _exactly(self, n_bytes: int) -> bytes:
        got = b""
        while len(got) < n_bytes:
            try:
                piece = self.socket.recv(n_bytes - len(got))
            except ConnectionResetError:
                return b""
            if not piece:
                return b""
            got += piece
        return got

    def close(self) -> None:
        self.socket.close()


class RawServer:
    """Answers each call with the pieces that `answer` makes; none: it hangs up."""

    def __init__(self, answer: Callable[[bytes], list[bytes]]) -> None:
        self.name = f"relax-test-{os.urandom(8).hex()}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind("\0" + self.name)
        self.socket.listen(16)
        self._answer = answer
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(ConnectionError):
            while request := connection.recv(1 << 16):
                pieces = self._answer(request)
                if not pieces:
                    return
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(0)

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
