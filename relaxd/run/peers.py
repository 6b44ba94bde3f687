"""What relaxd asks of a run's queue and dcs, and nothing else. One channel each, closed with the run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import grpc.aio

from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc
from relax.queue.v1 import queue_pb2, queue_pb2_grpc
from relax_common.errors import from_rpc
from relax_common.rpc.channels import acall_with_retry, aio_channel

CALL_SECONDS = 60.0
SAVE_SECONDS = 3600.0
STREAM_SECONDS = 24 * 3600.0


class QueuePeer:
    """The sample bus, for one run. Calls named `..._once` raise Unavailable while it is away; the others wait."""

    def __init__(self, address: str, run: str) -> None:
        self._channel = aio_channel(address)
        self._stub = queue_pb2_grpc.QueueServiceStub(self._channel)
        self._run = run

    async def close(self) -> None:
        await self._channel.close()

    async def open(self, request: queue_pb2.OpenRunRequest) -> None:
        await acall_with_retry(
            lambda s: self._stub.OpenRun(request, timeout=s),
            what="the queue to open the run",
            deadline_seconds=CALL_SECONDS,
        )

    async def status_once(self) -> queue_pb2.RunStatus:
        request = queue_pb2.GetStatusRequest(run=self._run)
        try:
            response = await self._stub.GetStatus(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from error
        status: queue_pb2.RunStatus = response.runs[0]
        return status

    async def offer_once(self, groups: Sequence[queue_pb2.PromptGroup], term: int, after_dcs_revision: int = 0) -> None:
        request = queue_pb2.OfferGroupsRequest(
            run=self._run, groups=groups, term=term, after_dcs_revision=after_dcs_revision
        )
        try:
            await self._stub.OfferGroups(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from error

    async def seal_once(self) -> None:
        try:
            await self._stub.SealRun(queue_pb2.SealRunRequest(run=self._run), timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from error

    async def end(self) -> None:
        await acall_with_retry(
            lambda s: self._stub.EndRun(queue_pb2.EndRunRequest(run=self._run), timeout=s),
            what="the queue to end the run",
            deadline_seconds=CALL_SECONDS,
        )

    def events(self, after_revision: int) -> AsyncIterator[queue_pb2.WatchEventsResponse]:
        request = queue_pb2.WatchEventsRequest(run=self._run, after_revision=after_revision)
        stream: AsyncIterator[queue_pb2.WatchEventsResponse] = self._stub.WatchEvents(request, timeout=STREAM_SECONDS)
        return stream


class DcsPeer:
    """The weight service, for one run; the same rule."""

    def __init__(self, address: str, run: str) -> None:
        self._channel = aio_channel(address)
        self._stub = dcs_pb2_grpc.DcsServiceStub(self._channel)
        self._run = run

    async def close(self) -> None:
        await self._channel.close()

    async def open(self, request: dcs_pb2.OpenRunRequest) -> None:
        await acall_with_retry(
            lambda s: self._stub.OpenRun(request, timeout=s),
            what="dcs to open the run",
            deadline_seconds=CALL_SECONDS,
        )

    async def checkpoints_once(self) -> dcs_pb2.ListCheckpointsResponse:
        request = dcs_pb2.ListCheckpointsRequest(run=self._run)
        try:
            response: dcs_pb2.ListCheckpointsResponse = await self._stub.ListCheckpoints(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from error
        return response

    async def save_checkpoint(self) -> None:
        await acall_with_retry(
            lambda s: self._stub.SaveCheckpoint(dcs_pb2.SaveCheckpointRequest(run=self._run), timeout=s),
            what="dcs to save the last checkpoint",
            deadline_seconds=SAVE_SECONDS,
        )

    async def roll_back(self, lost_head: dcs_pb2.RollbackRequest) -> dcs_pb2.RollbackRecord:
        response = await acall_with_retry(
            lambda s: self._stub.Rollback(lost_head, timeout=s),
            what="dcs to append the rollback",
            deadline_seconds=CALL_SECONDS,
        )
        record: dcs_pb2.RollbackRecord = response.record
        return record

    async def end(self) -> None:
        await acall_with_retry(
            lambda s: self._stub.EndRun(dcs_pb2.EndRunRequest(run=self._run), timeout=s),
            what="dcs to end the run",
            deadline_seconds=CALL_SECONDS,
        )

    def log(self, after_revision: int) -> AsyncIterator[dcs_pb2.WatchLogResponse]:
        request = dcs_pb2.WatchLogRequest(run=self._run, after_revision=after_revision)
        stream: AsyncIterator[dcs_pb2.WatchLogResponse] = self._stub.WatchLog(request, timeout=STREAM_SECONDS)
        return stream
