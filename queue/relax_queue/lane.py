"""How a client's payload travels: negotiated with the broker at first use, and again after either side was replaced."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any, Literal

import grpc
import grpc.aio

from relax.queue.v1 import queue_pb2 as pb
from relax.queue.v1 import queue_pb2_grpc
from relax_common.channels import plain_channel
from relax_common.errors import Precondition
from relax_common.host_calls.stub import HostStub
from relax_common.logs import get_logger
from relax_queue.lanes.mapping import Mapping
from relax_queue.lanes.shared import SharedMemory

LaneName = Literal["auto", "grpc", "shm"]
"""auto: shared memory where both sides are on one host, gRPC otherwise. grpc, shm: only that."""
SERVICE = pb.DESCRIPTOR.services_by_name["QueueService"]
_PATH = f"/{SERVICE.full_name}/"


class Lane:
    """A way to one broker: stubs over a channel and, on the same host, host calls and shared memory.

    channel: a grpc or a grpc.aio one, `own` if only this lane uses it. host_calls: a stub of relax_common.host_calls.
    """

    def __init__(self, channel: Any, shared: SharedMemory | None, host_calls: Any = None, *, own: bool) -> None:
        self.channel = channel
        self.shared = shared
        self.host_calls = host_calls
        self.own = own
        self.stub: Any = host_calls or queue_pb2_grpc.QueueServiceStub(channel)
        # Frames are bytes as they are: serialising them again would copy them.
        self.put_frames = channel.stream_unary(f"{_PATH}Put", None, pb.PutResponse.FromString)
        self.return_frames = channel.stream_unary(f"{_PATH}ReturnGroup", None, pb.ReturnGroupResponse.FromString)
        self.write_frames = channel.stream_unary(f"{_PATH}WriteField", None, pb.WriteFieldResponse.FromString)
        self.blob_frames = channel.stream_unary(f"{_PATH}PutBlob", None, pb.PutBlobResponse.FromString)
        self.read_frames = channel.unary_stream(f"{_PATH}ReadRows", pb.ReadRowsRequest.SerializeToString, None)
        self.read_blob = channel.unary_stream(f"{_PATH}GetBlob", pb.GetBlobRequest.SerializeToString, None)


def host_socket(hello: pb.HelloResponse, name: LaneName, *, here: bool) -> str:
    """Where host calls go; "" where a lane does without: "grpc" is what travels between hosts."""
    return hello.host_socket if here and name != "grpc" else ""


def reachable_on_host(target: str) -> bool:
    """Does the broker's own socket answer here? Its name is random, so no other queue can be meant."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect("\0" + target.removeprefix("unix-abstract:"))
        except OSError:
            return False
    return True


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

    def use(self, seconds: float) -> Lane:
        """The negotiated lane. Raises grpc.RpcError where the broker does not answer."""
        with self._lock:
            if self._lane is None:
                self._lane = self._negotiate(seconds)
            return self._lane

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
        host_calls = HostStub(SERVICE, socket_name) if socket_name else None
        return Lane(plain_channel(hello.unix_target) if here else self._direct, self._shared, host_calls, own=here)

    def drop(self, lane: Lane, *, session_gone: bool = False) -> None:
        """The broker was not reached on this lane, or does not know its session: negotiate again."""
        with self._lock:
            if self._lane is not lane:
                return
            self._lane = None
            if session_gone:
                self._shared = None
        _close(lane)

    def close(self) -> None:
        """Ends the session: what the client holds is free then."""
        with self._lock:
            lane, self._lane = self._lane, None
        if lane is None:
            return
        if lane.shared is not None:
            try:
                lane.stub.Detach(pb.DetachRequest(session=lane.shared.session), timeout=1.0)
            except grpc.RpcError as error:
                get_logger().debug("session_not_detached", error=str(error))
        _close(lane)


def _close(lane: Lane) -> None:
    if lane.host_calls is not None:
        lane.host_calls.close()
    if lane.own:
        lane.channel.close()
