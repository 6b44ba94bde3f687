"""relax.dcs.v1 over the runs of one state directory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from dcs.metrics import COMMITS, PULLED_BYTES, PUSHED_BYTES, observe_memory
from dcs.rules.line import POLICY
from dcs.run_log import Run
from dcs.store import verified_parts, verify_snapshot
from dcs.transport.places import place_from_proto, place_to_proto
from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc
from relax_common.errors import InvalidInput, MemoryOutOfReach, NotFound, Precondition
from relax_common.failpoints import failpoint
from relax_common.rpc.streams import chunks, read_chunks, read_header
from relax_common.storage.checkpoint_folder import Found
from relax_common.storage.sealed_memory import SealedMemory, open_sealed
from relax_common.versions import PolicyVersion

_RUN_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}")


class DcsServicer(dcs_pb2_grpc.DcsServiceServicer):
    """Thin: finds the run, converts messages, counts."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / "runs"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._runs = {path.stem: Run(path) for path in sorted(self._folder.glob("*.log"))}

    def _run(self, name: str) -> Run:
        run = self._runs.get(name)
        if run is None:
            raise NotFound(f"dcs has no run {name!r}")
        return run

    async def OpenRun(self, request: dcs_pb2.OpenRunRequest, context: Any) -> dcs_pb2.OpenRunResponse:
        if not _RUN_NAME.fullmatch(request.run):
            raise InvalidInput(f"run {request.run!r}: letters, digits, '_', '.', '-' only")
        run = self._runs.get(request.run)
        if run is None:
            run = self._runs[request.run] = Run(self._folder / f"{request.run}.log")
        await run.open(request)
        return dcs_pb2.OpenRunResponse()

    async def RegisterTerm(self, request: dcs_pb2.RegisterTermRequest, context: Any) -> dcs_pb2.RegisterTermResponse:
        return dcs_pb2.RegisterTermResponse(term=await self._run(request.run).fence(request.holder, request.term))

    async def BeginVersion(self, request: dcs_pb2.BeginVersionRequest, context: Any) -> dcs_pb2.BeginVersionResponse:
        version = PolicyVersion.from_proto(request.version)
        attempt = await self._run(request.run).begin(request.model, version, request.term)
        return dcs_pb2.BeginVersionResponse(attempt=attempt)

    async def PushSlices(
        self, frames: AsyncIterator[dcs_pb2.PushSlicesRequest], context: Any
    ) -> dcs_pb2.PushSlicesResponse:
        header = await read_header(frames, "PushSlices")
        run = self._run(header.run)
        run.push_target(header)
        size = sum(entry.size_bytes for entry in header.slices)
        memory = await _bytes_of(header, frames, size, "PushSlices")
        stored = run.store_slices(header, await asyncio.to_thread(verified_parts, header, memory))
        PUSHED_BYTES.labels("shared" if header.HasField("memory") else "stream").inc(size)
        observe_memory(header.run, run.store)
        return dcs_pb2.PushSlicesResponse(slices=stored)

    async def CommitVersion(self, request: dcs_pb2.CommitVersionRequest, context: Any) -> dcs_pb2.CommitVersionResponse:
        run = self._run(request.run)
        revision, record = await run.commit(request.record)
        COMMITS.inc()
        observe_memory(request.run, run.store)
        return dcs_pb2.CommitVersionResponse(revision=revision, record=record)

    async def AbortVersion(self, request: dcs_pb2.AbortVersionRequest, context: Any) -> dcs_pb2.AbortVersionResponse:
        run = self._run(request.run)
        run.line.check_term(POLICY, request.term)
        run.abort(request.attempt)
        return dcs_pb2.AbortVersionResponse()

    async def GetHead(self, request: dcs_pb2.GetHeadRequest, context: Any) -> dcs_pb2.GetHeadResponse:
        run = self._run(request.run)
        line = run.line
        recovery, in_memory = run.recovery()
        response = dcs_pb2.GetHeadResponse(
            lineage=line.lineage,
            recovery=recovery.to_proto(),
            recovery_in_memory=in_memory,
            revision=line.revision,
            line=[commit.version for commit in line.commits],
            memory_bytes=run.store.used_bytes,
        )
        if line.head is not None:
            held = run.store.versions.get((line.head.lineage, line.head.number))
            response.has_head = True
            response.head.CopyFrom(line.head.to_proto())
            response.head_record.CopyFrom(line.commits[-1])
            response.holds_head_bytes = held is not None and held.complete
        return response

    async def WatchLog(self, request: dcs_pb2.WatchLogRequest, context: Any) -> AsyncIterator[dcs_pb2.WatchLogResponse]:
        run = self._run(request.run)
        if request.after_revision > run.line.revision:
            raise Precondition(
                f"the log of {request.run} ends at revision {run.line.revision}, the caller has seen "
                f"{request.after_revision}: it belongs to another dcs state directory"
            )
        async for record in run.watch(request.after_revision):
            yield dcs_pb2.WatchLogResponse(record=record)

    async def GetManifest(self, request: dcs_pb2.GetManifestRequest, context: Any) -> dcs_pb2.GetManifestResponse:
        run = self._run(request.run)
        version = PolicyVersion.from_proto(request.version)
        held = run.held(version)
        memories = list(dict.fromkeys(part.memory for part in held.parts()))
        number = {memory: at for at, memory in enumerate(memories)}
        return dcs_pb2.GetManifestResponse(
            slices=held.entries(),
            manifest_hash=run.line.commit_of(version).manifest_hash,
            memories=[place_to_proto(memory.place()) for memory in memories],
            offsets=[dcs_pb2.MemoryOffset(memory=number[part.memory], offset=part.offset) for part in held.parts()],
        )

    async def PullSlices(
        self, request: dcs_pb2.PullSlicesRequest, context: Any
    ) -> AsyncIterator[dcs_pb2.PullSlicesResponse]:
        held = self._run(request.run).held(PolicyVersion.from_proto(request.version))
        for chunk in held.stream(request.offset):
            PULLED_BYTES.inc(len(chunk))
            yield dcs_pb2.PullSlicesResponse(chunk=chunk)

    async def ConfirmServed(self, request: dcs_pb2.ConfirmServedRequest, context: Any) -> dcs_pb2.ConfirmServedResponse:
        return dcs_pb2.ConfirmServedResponse(revision=await self._run(request.run).confirm(request.record))

    async def PutRecoverySnapshot(
        self, frames: AsyncIterator[dcs_pb2.PutRecoverySnapshotRequest], context: Any
    ) -> dcs_pb2.PutRecoverySnapshotResponse:
        header = await read_header(frames, "PutRecoverySnapshot")
        run = self._run(header.run)
        run.check_snapshot(header)
        memory = await _bytes_of(header, frames, header.size_bytes, "PutRecoverySnapshot")
        await asyncio.to_thread(verify_snapshot, header, memory)
        await run.put_snapshot(header, memory)
        failpoint("dcs.after_snapshot")
        observe_memory(header.run, run.store)
        return dcs_pb2.PutRecoverySnapshotResponse()

    async def GetRecoverySnapshot(
        self, request: dcs_pb2.GetRecoverySnapshotRequest, context: Any
    ) -> AsyncIterator[dcs_pb2.GetRecoverySnapshotResponse]:
        run = self._run(request.run)
        version = PolicyVersion.from_proto(request.version)
        header, data = await asyncio.to_thread(run.recovery_state, version, request.role, request.rank)
        yield dcs_pb2.GetRecoverySnapshotResponse(header=header)
        for chunk in chunks(data):
            yield dcs_pb2.GetRecoverySnapshotResponse(chunk=chunk)

    async def Rollback(self, request: dcs_pb2.RollbackRequest, context: Any) -> dcs_pb2.RollbackResponse:
        run = self._run(request.run)
        revision, record = await run.rollback(PolicyVersion.from_proto(request.lost_head), request.reason)
        return dcs_pb2.RollbackResponse(revision=revision, record=record)

    async def SaveCheckpoint(
        self, request: dcs_pb2.SaveCheckpointRequest, context: Any
    ) -> dcs_pb2.SaveCheckpointResponse:
        version = await self._run(request.run).save_checkpoint()
        return dcs_pb2.SaveCheckpointResponse(version=version.to_proto())

    async def ListCheckpoints(
        self, request: dcs_pb2.ListCheckpointsRequest, context: Any
    ) -> dcs_pb2.ListCheckpointsResponse:
        checkpoints = self._run(request.run).kept_checkpoints()
        return dcs_pb2.ListCheckpointsResponse(
            checkpoints=[checkpoint_to(found) for found in await asyncio.to_thread(checkpoints.list)],
            saving=checkpoints.saving,
            failures_in_a_row=checkpoints.failures_in_a_row,
            last_error=checkpoints.last_error,
        )

    async def PinCheckpoint(self, request: dcs_pb2.PinCheckpointRequest, context: Any) -> dcs_pb2.PinCheckpointResponse:
        self._run(request.run).kept_checkpoints().pin(PolicyVersion.from_proto(request.version), request.pinned)
        return dcs_pb2.PinCheckpointResponse()

    async def DeleteCheckpoint(
        self, request: dcs_pb2.DeleteCheckpointRequest, context: Any
    ) -> dcs_pb2.DeleteCheckpointResponse:
        version = PolicyVersion.from_proto(request.version)
        await asyncio.to_thread(self._run(request.run).kept_checkpoints().delete, version)
        return dcs_pb2.DeleteCheckpointResponse()

    async def EndRun(self, request: dcs_pb2.EndRunRequest, context: Any) -> dcs_pb2.EndRunResponse:
        run = self._run(request.run)
        if run.checkpoints is not None:
            await run.checkpoints.finish()
        run.store.drop_pending()
        for key in list(run.store.versions):
            run.store.drop_version(key)
        for snapshot in list(run.store.snapshots):
            run.store.drop_snapshot(snapshot)
        return dcs_pb2.EndRunResponse()


async def _bytes_of(header: Any, frames: AsyncIterator[Any], size_bytes: int, what: str) -> SealedMemory:
    """Mapped where the caller says that they lie in memory of this host, else from the stream."""
    if not header.HasField("memory"):
        return await read_chunks(frames, size_bytes, what)
    try:
        return await asyncio.to_thread(open_sealed, place_from_proto(header.memory))
    except OSError as error:
        raise MemoryOutOfReach(f"{what}: dcs cannot map the bytes: {error}") from error


def checkpoint_to(found: Found) -> dcs_pb2.Checkpoint:
    message = dcs_pb2.Checkpoint(version=found.version.to_proto(), folder=str(found.folder), pinned=found.pinned)
    message.fault = found.fault
    if found.manifest is not None:
        message.size_bytes = found.manifest.size_bytes
        message.step = found.manifest.step
        message.saved_at.FromNanoseconds(int(found.manifest.saved_unix_seconds * 1e9))
    return message
