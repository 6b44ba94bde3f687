"""Puts and reads over whatever lane there is: the part of the client that moves rows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import grpc

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import (
    ArenaFull,
    DataLoss,
    SlabGone,
    UnknownSession,
    from_rpc,
)
from relax_common.rows import RowKey
from relax_common.rpc.channels import CHUNK_BYTES, call_with_retry
from relax_queue.client.lane import Lane, LaneName, Lanes, seconds_left
from relax_queue.client.plans import PlanAnswer, disposition, plan_from
from relax_queue.rows.column_block import Column, Digest, Layout, decode, layout
from relax_queue.rows.row_keys import block_to
from relax_queue.transport.buffers import Buffers
from relax_queue.transport.frames import INLINE_BYTES, REQUEST_CHUNK, RESPONSE_CHUNK, chunk_of, frames
from relax_queue.transport.shm.shared import SharedMemory

CALL_SECONDS = 60.0
"""How long a call is repeated or waits by default."""


class RowsClient:
    """Thread-safe."""

    def __init__(self, channel: grpc.Channel, run: str, lane: LaneName) -> None:
        self._run = run
        self._lanes = Lanes(channel, lane)
        self._buffers = Buffers()

    def close(self) -> None:
        self._lanes.close()

    @property
    def lane(self) -> str:
        """Name of the lane in use, for people."""
        name: str = self._attempt(lambda lane, left: lane.name, "the queue")
        return name

    def _attempt(self, call: Any, what: str, seconds: float = CALL_SECONDS) -> Any:
        """Repeat `call(lane, seconds left)` while the broker is UNAVAILABLE, each time on a lane that may be new."""

        def attempt(left: float) -> Any:
            end = time.monotonic() + left
            for last in (False, True):
                lane = self._lanes.use(seconds_left(end))
                try:
                    return call(lane, seconds_left(end))
                except grpc.RpcError as rpc_error:
                    error = from_rpc(rpc_error)
                    gone = isinstance(error, UnknownSession)
                    if error.code is grpc.StatusCode.UNAVAILABLE or gone:
                        self._lanes.drop(lane, session_gone=gone)
                    if last or not gone:
                        raise
                finally:
                    self._lanes.done(lane)
            raise AssertionError("the second attempt ends or raises")

        return call_with_retry(attempt, what=what, deadline_seconds=seconds)

    # Puts

    def put(self, header: pb.PutHeader, columns: Mapping[str, Column]) -> str:
        extent = layout(columns) if header.rows.runs else None
        header.size_bytes = extent.size if extent else 0  # the same for a repeat
        result: str = self._attempt(lambda lane, left: _put(lane, header, extent, left), "the queue (Put)")
        return result

    def send(self, method: str, header: Any, frame: type[Any], payload: Iterable[bytes | memoryview]) -> Any:
        """A stream of a header and chunks."""
        first, buffers = frame(header=header).SerializeToString(), list(payload)

        def call(lane: Lane, left: float) -> Any:
            return getattr(lane, method)(stream(first, buffers), timeout=left)

        return self._attempt(call, f"the queue ({frame.DESCRIPTOR.name.removesuffix('Request')})")

    # Plans and reads

    def plan(self, request: pb.GetPlanRequest, wait_seconds: float) -> PlanAnswer:
        def call(lane: Lane, left: float) -> PlanAnswer:
            if lane.host_calls is None:
                return plan_from(lane.stub.GetPlan(request, timeout=left))
            answer: PlanAnswer = lane.host_calls.GetPlan(request, timeout=left, then=plan_from)
            return answer

        found: PlanAnswer = self._attempt(call, f"the queue (plan of step {request.step})", wait_seconds)
        return found

    def read(
        self, plan: pb.PlanKey, rows: Sequence[RowKey], fields: Sequence[str], wait_seconds: float
    ) -> dict[str, Column]:
        block = block_to(rows)

        def call(lane: Lane, left: float) -> dict[str, Column]:
            shared = lane.shared
            request = pb.FetchRowsRequest(run=self._run, plan=plan, rows=block, fields=fields)
            if shared is not None:
                request.session, request.closed_views = shared.session, shared.closed_views()
            try:
                response: pb.FetchRowsResponse = lane.stub.FetchRows(request, timeout=left)
            except grpc.RpcError:
                if shared is not None:
                    shared.not_told(request.closed_views)
                raise
            kind = response.WhichOneof("answer")
            if kind == "extent":
                return decode(response.extent)
            if kind == "placed" and shared is not None:
                return shared.columns(response.placed)
            stream = lane.read_frames(
                pb.ReadRowsRequest(run=self._run, plan=plan, rows=block, fields=fields), timeout=left
            )
            return _decode_frames(stream, self._buffers.take(response.size_bytes))

        found: dict[str, Column] = self._attempt(call, f"rows of step {plan.step} at the queue", wait_seconds)
        return found

    def read_blob(self, name: str) -> bytes:
        request = pb.GetBlobRequest(run=self._run, hash=name)

        def call(lane: Lane, left: float) -> bytes:
            return b"".join(map(_chunk, lane.read_blob(request, timeout=left)))

        content: bytes = self._attempt(call, f"blob {name} at the queue")
        return content


def stream(first: bytes, buffers: Iterable[bytes | memoryview]) -> Iterable[bytes]:
    yield first
    yield from frames(buffers, REQUEST_CHUNK)


def _chunk(frame: bytes) -> memoryview:
    chunk = chunk_of(frame, RESPONSE_CHUNK)
    if chunk is None:
        raise DataLoss("the queue sent a frame that is no chunk")
    return chunk


def _decode_frames(stream: Iterable[bytes], buffer: memoryview) -> dict[str, Column]:
    """Every byte of the buffer is written by a frame, or the sizes do not match."""
    size_bytes = len(buffer)
    digest, at = Digest(), 0
    for frame in stream:
        chunk = _chunk(frame)
        if at + len(chunk) > size_bytes:
            raise DataLoss(f"more than the announced {size_bytes} bytes of rows came")
        buffer[at : at + len(chunk)] = chunk
        digest.update(chunk)
        at += len(chunk)
    if at != size_bytes:
        raise DataLoss(f"{at} of the announced {size_bytes} bytes of rows came")
    return decode(buffer, digest=digest.value())


def _put(lane: Lane, header: pb.PutHeader, extent: Layout | None, left: float) -> str:
    size = extent.size if extent else 0
    if extent is not None and lane.shared is not None and size > INLINE_BYTES:
        try:
            return _put_shared(lane, lane.shared, header, extent, left)
        except (ArenaFull, SlabGone):
            pass  # a full arena, or a slab that came too late: gRPC carries the same rows
    if size > CHUNK_BYTES and extent is not None:
        first = pb.PutRequest(header=header).SerializeToString()
        response: pb.PutResponse = lane.put_frames(stream(first, extent.buffers()), timeout=left)
        return response.disposition
    content = extent.joined() if extent else b""
    request = pb.PutGroupsRequest(puts=[pb.GroupPut(header=header, extent=content)])
    several: pb.PutGroupsResponse = lane.stub.PutGroups(request, timeout=left)
    return disposition(several.results[0])


def _put_shared(lane: Lane, shared: SharedMemory, header: pb.PutHeader, extent: Layout, left: float) -> str:
    taken = shared.take(extent.size)
    if taken is None:
        asked = pb.LeaseSlabRequest(session=shared.session, size_bytes=extent.size, unused=shared.unused())
        try:
            granted: pb.LeaseSlabResponse = lane.stub.LeaseSlab(asked, timeout=left)
        except grpc.RpcError as rpc_error:
            shared.forget(*asked.unused)
            error = from_rpc(rpc_error)
            if isinstance(error, ArenaFull):
                raise error from rpc_error
            raise
        taken = shared.granted(granted.grant)
    request = shared.put_request(header, extent, taken)
    with ExitStack() as undo:
        undo.callback(shared.forget, taken[0], *request.unused)
        response: pb.PutGroupsResponse = lane.stub.PutGroups(request, timeout=left)
        undo.pop_all()
    return disposition(shared.settle(taken, response))
