"""relax.dcs.v1 over the runs of one state directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from dcs.metrics import COMMITS, PULLED_BYTES, PUSHED_BYTES, observe_memory
from dcs.runs import Runs
from dcs.store import HeldVersion, verified_parts, verify_snapshot
from dcs.transport import STREAM, TRANSPORTS, Transport
from dcs.versions import Versions
from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc
from relax_common.errors import MemoryOutOfReach
from relax_common.failpoints import failpoint
from relax_common.names import check_name
from relax_common.rpc.calls import ServicerContext, chunks, frame_chunks, read_header
from relax_common.storage.checkpoint_folder import Found
from relax_common.storage.sealed_memory import SealedMemory
from relax_common.versions import PolicyVersion


class DcsServicer(dcs_pb2_grpc.DcsServiceServicer):
    """Thin: finds the run, converts messages, counts."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def _run(self, name: str) -> Versions:
        return self._runs.get(name)

    async def OpenRun(self, request: dcs_pb2.OpenRunRequest, context: ServicerContext) -> dcs_pb2.OpenRunResponse:
        await self._runs.open(request)
        return dcs_pb2.OpenRunResponse()

    async def RegisterTerm(
        self, request: dcs_pb2.RegisterTermRequest, context: ServicerContext
    ) -> dcs_pb2.RegisterTermResponse:
        holder = check_name(request.holder, "holder")
        return dcs_pb2.RegisterTermResponse(term=await self._run(request.run).fence(holder, request.term))

    async def BeginVersion(
        self, request: dcs_pb2.BeginVersionRequest, context: ServicerContext
    ) -> dcs_pb2.BeginVersionResponse:
        version = PolicyVersion.from_proto(request.version)
        attempt = await self._run(request.run).begin(request.model, version, request.term)
        return dcs_pb2.BeginVersionResponse(attempt=attempt)

    async def PushSlices(
        self, frames: AsyncIterator[dcs_pb2.PushSlicesRequest], context: ServicerContext
    ) -> dcs_pb2.PushSlicesResponse:
        header = await read_header(frames, "PushSlices")
        run = self._run(header.run)
        size = sum(entry.size_bytes for entry in header.slices)
        with run.store.receiving(run.check_push(header), "PushSlices"):
            memory = await _bytes_of(header, frames, size, "PushSlices")
            parts = await asyncio.to_thread(verified_parts, header, memory)
        stored = run.store_slices(header, parts)
        PUSHED_BYTES.labels(header.handover.transport or STREAM).inc(size)
        observe_memory(header.run, run.store)
        return dcs_pb2.PushSlicesResponse(slices=stored)

    async def CommitVersion(
        self, request: dcs_pb2.CommitVersionRequest, context: ServicerContext
    ) -> dcs_pb2.CommitVersionResponse:
        run = self._run(request.run)
        revision, record = await run.commit(request.record)
        COMMITS.inc()
        observe_memory(request.run, run.store)
        return dcs_pb2.CommitVersionResponse(revision=revision, record=record)

    async def AbortVersion(
        self, request: dcs_pb2.AbortVersionRequest, context: ServicerContext
    ) -> dcs_pb2.AbortVersionResponse:
        self._run(request.run).abort(request.attempt, request.term)
        return dcs_pb2.AbortVersionResponse()

    async def GetHead(self, request: dcs_pb2.GetHeadRequest, context: ServicerContext) -> dcs_pb2.GetHeadResponse:
        run = self._run(request.run)
        line = run.line
        point = run.recovery.point()
        response = dcs_pb2.GetHeadResponse(
            lineage=line.lineage,
            recovery=point.version.to_proto(),
            recovery_in_memory=point.in_memory,
            recovery_on_disk=run.recovery.on_disk().to_proto(),
            revision=line.revision,
            line=[first.to_proto() for first in line.starts],
            memory_bytes=run.store.used_bytes,
        )
        if line.head is not None:
            held = run.store.versions.get((line.head.lineage, line.head.number))
            response.has_head = True
            response.head.CopyFrom(line.head.to_proto())
            response.head_record.CopyFrom(run.log.head_record())
            response.holds_head_bytes = held is not None and held.complete
        return response

    async def WatchLog(
        self, request: dcs_pb2.WatchLogRequest, context: ServicerContext
    ) -> AsyncIterator[dcs_pb2.WatchLogResponse]:
        log = self._run(request.run).log
        log.check_revision(request.after_revision)
        async for record in log.watch(request.after_revision):
            yield dcs_pb2.WatchLogResponse(record=record)

    async def GetManifest(
        self, request: dcs_pb2.GetManifestRequest, context: ServicerContext
    ) -> dcs_pb2.GetManifestResponse:
        run = self._run(request.run)
        version = PolicyVersion.from_proto(request.version)
        held = run.held(version)
        response = dcs_pb2.GetManifestResponse(
            slices=held.entries(), manifest_hash=run.line.commit_of(version).manifest_hash
        )
        transport = TRANSPORTS.get(request.transport)
        if transport is not None:
            _offer(response, held, transport)
        return response

    async def PullSlices(
        self, request: dcs_pb2.PullSlicesRequest, context: ServicerContext
    ) -> AsyncIterator[dcs_pb2.PullSlicesResponse]:
        held = self._run(request.run).held(PolicyVersion.from_proto(request.version))
        for chunk in held.stream(request.offset):
            PULLED_BYTES.inc(len(chunk))
            yield dcs_pb2.PullSlicesResponse(chunk=chunk)

    async def ConfirmServed(
        self, request: dcs_pb2.ConfirmServedRequest, context: ServicerContext
    ) -> dcs_pb2.ConfirmServedResponse:
        check_name(request.record.server, "server")
        return dcs_pb2.ConfirmServedResponse(revision=await self._run(request.run).confirm(request.record))

    async def PutRecoverySnapshot(
        self, frames: AsyncIterator[dcs_pb2.PutRecoverySnapshotRequest], context: ServicerContext
    ) -> dcs_pb2.PutRecoverySnapshotResponse:
        header = await read_header(frames, "PutRecoverySnapshot")
        run = self._run(header.run)
        with run.store.receiving(run.check_snapshot(header), "PutRecoverySnapshot"):
            memory = await _bytes_of(header, frames, header.size_bytes, "PutRecoverySnapshot")
            await asyncio.to_thread(verify_snapshot, header, memory)
        await run.put_snapshot(header, memory)
        failpoint("dcs.after_snapshot")
        observe_memory(header.run, run.store)
        return dcs_pb2.PutRecoverySnapshotResponse()

    async def GetRecoverySnapshot(
        self, request: dcs_pb2.GetRecoverySnapshotRequest, context: ServicerContext
    ) -> AsyncIterator[dcs_pb2.GetRecoverySnapshotResponse]:
        run = self._run(request.run)
        version = PolicyVersion.from_proto(request.version)
        header, data = await asyncio.to_thread(run.recovery.state, version, request.role, request.rank)
        yield dcs_pb2.GetRecoverySnapshotResponse(header=header)
        for chunk in chunks(data):
            yield dcs_pb2.GetRecoverySnapshotResponse(chunk=chunk)

    async def Rollback(self, request: dcs_pb2.RollbackRequest, context: ServicerContext) -> dcs_pb2.RollbackResponse:
        run = self._run(request.run)
        revision, record = await run.rollback(PolicyVersion.from_proto(request.lost_head), request.reason)
        return dcs_pb2.RollbackResponse(revision=revision, record=record)

    async def SaveCheckpoint(
        self, request: dcs_pb2.SaveCheckpointRequest, context: ServicerContext
    ) -> dcs_pb2.SaveCheckpointResponse:
        version = await self._run(request.run).recovery.save_checkpoint()
        return dcs_pb2.SaveCheckpointResponse(version=version.to_proto())

    async def ListCheckpoints(
        self, request: dcs_pb2.ListCheckpointsRequest, context: ServicerContext
    ) -> dcs_pb2.ListCheckpointsResponse:
        checkpoints = self._run(request.run).recovery.kept_checkpoints()
        return dcs_pb2.ListCheckpointsResponse(
            checkpoints=[checkpoint_to(found) for found in await asyncio.to_thread(checkpoints.list)],
            saving=checkpoints.task is not None,
            failures_in_a_row=checkpoints.failures_in_a_row,
            last_error=checkpoints.last_error,
        )

    async def PinCheckpoint(
        self, request: dcs_pb2.PinCheckpointRequest, context: ServicerContext
    ) -> dcs_pb2.PinCheckpointResponse:
        self._run(request.run).recovery.kept_checkpoints().pin(
            PolicyVersion.from_proto(request.version), request.pinned
        )
        return dcs_pb2.PinCheckpointResponse()

    async def DeleteCheckpoint(
        self, request: dcs_pb2.DeleteCheckpointRequest, context: ServicerContext
    ) -> dcs_pb2.DeleteCheckpointResponse:
        version = PolicyVersion.from_proto(request.version)
        await asyncio.to_thread(self._run(request.run).recovery.kept_checkpoints().delete, version)
        return dcs_pb2.DeleteCheckpointResponse()

    async def EndRun(self, request: dcs_pb2.EndRunRequest, context: ServicerContext) -> dcs_pb2.EndRunResponse:
        await self._run(request.run).drop_bytes()
        return dcs_pb2.EndRunResponse()


async def _bytes_of(
    header: dcs_pb2.PushHeader | dcs_pb2.SnapshotHeader, frames: AsyncIterator[Any], size_bytes: int, what: str
) -> SealedMemory:
    """Receive the bytes by the transport that the header names; without a name they follow in the stream."""
    transport = TRANSPORTS.get(header.handover.transport or STREAM)
    if transport is None:
        raise MemoryOutOfReach(f"{what}: dcs does not know the transport {header.handover.transport!r}")
    return await transport.take(header.handover.place, frame_chunks(frames, what), size_bytes, what)


def _offer(response: dcs_pb2.GetManifestResponse, held: HeldVersion, transport: Transport) -> None:
    """Add the places of the parts to the response, if the transport can reach the memory of all of them."""
    memories = list(dict.fromkeys(part.memory for part in held.parts()))
    places = [transport.place_of(memory) for memory in memories]
    number = {memory: at for at, memory in enumerate(memories)}
    for place in places:
        if place is None:
            return
    response.handovers.extend(dcs_pb2.Handover(transport=transport.name, place=place) for place in places)
    response.offsets.extend(
        dcs_pb2.MemoryOffset(memory=number[part.memory], offset=part.offset) for part in held.parts()
    )


def checkpoint_to(found: Found) -> dcs_pb2.Checkpoint:
    message = dcs_pb2.Checkpoint(version=found.version.to_proto(), folder=str(found.folder), pinned=found.pinned)
    message.fault = found.fault
    if found.manifest is not None:
        message.size_bytes = found.manifest.size_bytes
        message.step = found.manifest.step
        message.saved_at.FromNanoseconds(int(found.manifest.saved_unix_seconds * 1e9))
    return message
