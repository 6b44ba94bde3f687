"""The controller's calls of dcs, as coroutines: a run's life, its log, its checkpoints. They carry no weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc

from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc
from relax_common.errors import from_rpc
from relax_common.rpc.channels import acall_with_retry, aio_channel
from relax_common.versions import PolicyVersion

CALL_SECONDS = 60.0
SAVE_SECONDS = 3600.0
STREAM_SECONDS = 24 * 3600.0
T = TypeVar("T")


class DcsControl:
    """One run at one dcs. Every call is idempotent and is repeated while dcs is UNAVAILABLE."""

    def __init__(self, address: str, run: str) -> None:
        self._channel = aio_channel(address)
        self._stub = dcs_pb2_grpc.DcsServiceStub(self._channel)
        self._run = run

    async def close(self) -> None:
        await self._channel.close()

    async def open(self, request: dcs_pb2.OpenRunRequest) -> None:
        await _call(lambda s: self._stub.OpenRun(request, timeout=s), "dcs to open the run")

    async def checkpoints(self) -> dcs_pb2.ListCheckpointsResponse:
        request = dcs_pb2.ListCheckpointsRequest(run=self._run)
        response: dcs_pb2.ListCheckpointsResponse = await _call(
            lambda s: self._stub.ListCheckpoints(request, timeout=s), "dcs to list the checkpoints"
        )
        return response

    async def save_checkpoint(self) -> None:
        request = dcs_pb2.SaveCheckpointRequest(run=self._run)
        await _call(
            lambda s: self._stub.SaveCheckpoint(request, timeout=s), "dcs to save the last checkpoint", SAVE_SECONDS
        )

    async def roll_back(self, lost_head: PolicyVersion, reason: str) -> PolicyVersion:
        """Returns the head after the rollback. A repeat is answered with the stored record."""
        request = dcs_pb2.RollbackRequest(run=self._run, lost_head=lost_head.to_proto(), reason=reason)
        response = await _call(lambda s: self._stub.Rollback(request, timeout=s), "dcs to append the rollback")
        return PolicyVersion(response.record.lineage, response.record.head)

    async def end(self) -> None:
        request = dcs_pb2.EndRunRequest(run=self._run)
        await _call(lambda s: self._stub.EndRun(request, timeout=s), "dcs to end the run")

    async def log(self, after_revision: int) -> AsyncIterator[dcs_pb2.LogRecord]:
        """Records after a revision, then each new one. Not repeated: the caller goes on after the last one it got."""
        request = dcs_pb2.WatchLogRequest(run=self._run, after_revision=after_revision)
        try:
            async for message in self._stub.WatchLog(request, timeout=STREAM_SECONDS):
                yield message.record
        except grpc.RpcError as rpc_error:
            raise from_rpc(rpc_error) from rpc_error


async def _call(call: Callable[[float], Awaitable[T]], what: str, seconds: float = CALL_SECONDS) -> T:
    return await acall_with_retry(call, what=what, deadline_seconds=seconds)
