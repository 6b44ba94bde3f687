"""How a client's payload travels: negotiated with the broker at first use, and again after either side was replaced."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any, Literal

import grpc
import grpc.aio

from relax.queue.v1 import queue_pb2 as pb
from relax.queue.v1 import queue_pb2_grpc
from relax_common.errors import CallFailed, DeadlineExceeded, Precondition, RelaxError
from relax_common.host_calls.stub import HostStub
from relax_common.process.logs import get_logger
from relax_common.rpc.channels import sync_channel
from relax_queue.transport.shm.mapping import Mapping
from relax_queue.transport.shm.shared import SharedMemory

LaneName = Literal["auto", "grpc", "shm"]
"""auto: shared memory where both sides are on one host, gRPC otherwise. grpc, shm: only that."""
SERVICE = pb.DESCRIPTOR.services_by_name["QueueService"]
DETACH_SECONDS = 1.0
"""How long a client that closes waits for a broker that does not answer."""
_PATH = f"/{SERVICE.full_name}/"


class Lane:
    """A way to one broker: stubs over a channel and, on the same host, host calls and shared memory.

    channel: a grpc or a grpc.aio one, `own` if only this lane uses it. host_calls: HostStub or AioHostStub and the name
    of the broker's socket, None to do without.
    """

    def __init__(
        self, channel: Any, shared: SharedMemory | None, host_calls: tuple[Any, str] | None, *, own: bool
    ) -> None:
        self.channel = channel
        self.shared = shared
        self.own = own
        self.users = 0
        """Calls in progress; a lane that was dropped is closed when the last of them has ended."""
        self.stub: Any = queue_pb2_grpc.QueueServiceStub(channel)
        self.host_calls: Any = None
        if host_calls is not None:
            kind, name = host_calls
            self.stub = self.host_calls = kind(SERVICE, name, self.stub)
        # Frames are bytes as they are: serialising them again would copy them.
        self.put_frames = channel.stream_unary(f"{_PATH}Put", None, pb.PutResponse.FromString)
        self.return_frames = channel.stream_unary(f"{_PATH}ReturnGroup", None, pb.ReturnGroupResponse.FromString)
        self.write_frames = channel.stream_unary(f"{_PATH}WriteField", None, pb.WriteFieldResponse.FromString)
        self.blob_frames = channel.stream_unary(f"{_PATH}PutBlob", None, pb.PutBlobResponse.FromString)
        self.read_frames = channel.unary_stream(f"{_PATH}ReadRows", pb.ReadRowsRequest.SerializeToString, None)
        self.read_blob = channel.unary_stream(f"{_PATH}GetBlob", pb.GetBlobRequest.SerializeToString, None)

    @property
    def name(self) -> str:
        """For people."""
        if self.shared is not None:
            return "shm"
        if self.host_calls is not None:
            return "host"
        return "grpc over a host socket" if self.own else "grpc"


def host_socket(hello: pb.HelloResponse, name: LaneName, *, here: bool) -> str:
    """Where host calls go; "" where a lane does without: "grpc" is what travels between hosts."""
    return hello.host_socket if here and name != "grpc" else ""


def reachable_on_host(target: str) -> bool:
    """Does the broker's own socket answer here? Its name is random, so no other queue can be meant."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect("\0" + target.removeprefix("unix-abstract:"))
        except BlockingIOError:
            return True  # it is there, and has many callers just now
        except OSError:
            return False
    return True


def seconds_left(end: float) -> float:
    """Until `end`, in time.monotonic() seconds."""
    return max(0.0, end - time.monotonic())


def closed() -> CallFailed:
    """What a call on a client that was closed ends with: no repeat helps."""
    return CallFailed(RelaxError("the client of the queue is closed"))


def not_negotiated(seconds: float) -> CallFailed:
    return CallFailed(DeadlineExceeded(f"waited {seconds:.1f} s for another call to negotiate a lane to the queue"))


def map_arena(hello: pb.HelloResponse, name: LaneName) -> Mapping | None:
    """The broker's arena, or None where this process cannot map it; Precondition where only that was asked for."""
    if name == "grpc":
        return None
    try:
        if not hello.arena_pid:
            raise OSError("it has none")
        return Mapping(hello.arena_pid, hello.arena_fd, hello.arena_bytes)
    except OSError as error:
        if name == "shm":
            raise Precondition(f"the queue's arena cannot be mapped: {error}; use the lane auto or grpc") from error
        get_logger().debug("arena_not_mapped", error=str(error))
        return None


class Lanes:
    """The lane of one client that calls from threads."""

    def __init__(self, channel: grpc.Channel, name: LaneName) -> None:
        self._direct = channel
        self._name = name
        self._lock = threading.Lock()
        self._lane: Lane | None = None
        self._shared: SharedMemory | None = None
        self._closed = False

    def use(self, seconds: float) -> Lane:
        """The negotiated lane, to be given to `done` afterwards. Raises grpc.RpcError."""
        end = time.monotonic() + seconds
        if not self._lock.acquire(timeout=seconds):
            raise not_negotiated(seconds)
        try:
            if self._closed:
                raise closed()
            if self._lane is None:
                self._lane = self._negotiate(seconds_left(end))
            self._lane.users += 1
            return self._lane
        finally:
            self._lock.release()

    def done(self, lane: Lane) -> None:
        with self._lock:
            lane.users -= 1
            over = not lane.users and self._lane is not lane
        if over:
            _close(lane)

    def _negotiate(self, seconds: float) -> Lane:
        stub = queue_pb2_grpc.QueueServiceStub(self._direct)
        hello: pb.HelloResponse = stub.Hello(pb.HelloRequest(), timeout=seconds)
        here = bool(hello.unix_target) and reachable_on_host(hello.unix_target)
        mapping = map_arena(hello, self._name)
        if mapping is None:
            self._shared = None
        elif self._shared is None or self._shared.mapping.secret != mapping.secret:
            request = pb.AttachRequest(pid=os.getpid(), secret=mapping.secret)
            attached: pb.AttachResponse = stub.Attach(request, timeout=seconds)
            self._shared = SharedMemory(mapping, attached.session)
        socket_name = host_socket(hello, self._name, here=here)
        host_calls = (HostStub, socket_name) if socket_name else None
        lane = Lane(sync_channel(hello.unix_target) if here else self._direct, self._shared, host_calls, own=here)
        if self._closed:
            _close(lane)
            raise closed()
        return lane

    def drop(self, lane: Lane, *, session_gone: bool = False) -> None:
        """The broker was not reached on this lane, or does not know its session: negotiate again."""
        with self._lock:
            if self._lane is lane:
                self._lane = None
                if session_gone:
                    self._shared = None

    def close(self) -> None:
        """Ends the session: what the client holds is free then. Calls in progress fail."""
        self._closed = True
        if not self._lock.acquire(timeout=DETACH_SECONDS):
            return  # whoever negotiates finds it closed
        lane, self._lane = self._lane, None
        self._lock.release()
        if lane is None:
            return
        if lane.shared is not None:
            try:
                lane.stub.Detach(pb.DetachRequest(session=lane.shared.session), timeout=DETACH_SECONDS)
            except grpc.RpcError as error:
                get_logger().debug("session_not_detached", error=str(error))
        _close(lane)


def _close(lane: Lane) -> None:
    if lane.host_calls is not None:
        lane.host_calls.close()
    if lane.own:
        lane.channel.close()
