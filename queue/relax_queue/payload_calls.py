"""Calls that carry payload: puts, reads, columns of roles, blobs."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from relax.queue.v1 import queue_pb2 as pb
from relax_common.channels import CHUNK_BYTES
from relax_common.errors import InvalidInput, RelaxError, Unavailable
from relax_common.failpoints import failpoint
from relax_common.streams import chunks, read_chunks, read_header
from relax_queue import reading, wire
from relax_queue.broker import Broker
from relax_queue.deadlines import HasDeadline, wait_end
from relax_queue.extent import encode
from relax_queue.field_writes import receive_field
from relax_queue.metrics import PUT_SECONDS
from relax_queue.payload import unwritten
from relax_queue.puts import receive_put
from relax_queue.run import Run

BLOB_BYTES_MAX = 1 << 30


class PayloadCalls:
    """The part of relax.queue.v1.QueueService that moves rows."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def PutGroups(self, request: pb.PutGroupsRequest, context: Any) -> pb.PutGroupsResponse:
        end = wait_end(context)
        # Side by side: one that waits for a version holds up no other, and all share one fsync.
        results = await asyncio.gather(*(self._put_group(put, end) for put in request.puts))
        return pb.PutGroupsResponse(results=results)

    async def _put_group(self, put: pb.GroupPut, end: float) -> pb.PutResult:
        try:
            run = self._broker.run(put.header.run)
            self._check_size(run, len(put.extent), "Put")
            return pb.PutResult(disposition=await self._put(run, put.header, put.extent, end))
        except Unavailable:
            raise  # all are repeated; those that were stored get their stored answer
        except RelaxError as error:
            return pb.PutResult(refusal=wire.refusal_to(error))

    async def _put(self, run: Run, header: pb.PutHeader, payload: bytes | bytearray, end: float) -> str:
        begun = time.perf_counter()
        disposition = await receive_put(run, header, payload, returns=False, end=end)
        failpoint("queue.after_put_logged")
        PUT_SECONDS.labels(header.run).observe(time.perf_counter() - begun)
        return disposition

    async def Put(self, request_iterator: AsyncIterator[pb.PutRequest], context: Any) -> pb.PutResponse:
        header: pb.PutHeader = await read_header(request_iterator, "Put")
        run = self._broker.run(header.run)
        payload = await self._payload(run, request_iterator, header.size_bytes, "Put")
        return pb.PutResponse(disposition=await self._put(run, header, payload, wait_end(context)))

    async def ReturnGroup(
        self, request_iterator: AsyncIterator[pb.ReturnGroupRequest], context: Any
    ) -> pb.ReturnGroupResponse:
        header: pb.PutHeader = await read_header(request_iterator, "ReturnGroup")
        run = self._broker.run(header.run)
        if header.completes_group != pb.GROUP_OUTCOME_UNSPECIFIED:
            raise InvalidInput("ReturnGroup gives a group back; completes_group must not be set")
        payload = await self._payload(run, request_iterator, header.size_bytes, "ReturnGroup")
        await receive_put(run, header, payload, returns=True, end=wait_end(context))
        return pb.ReturnGroupResponse()

    async def _payload(self, run: Run, frames: AsyncIterator[Any], size_bytes: int, what: str) -> bytearray:
        self._check_size(run, size_bytes, what)
        return await read_chunks(frames, size_bytes, what)

    def _check_size(self, run: Run, size_bytes: int, what: str) -> None:
        allowed = run.state.spec.bytes_per_group
        if size_bytes > allowed:
            raise InvalidInput(f"{what}: {size_bytes} bytes announced, a group may hold {allowed}", reason="OVERSIZE")

    async def WriteField(
        self, request_iterator: AsyncIterator[pb.WriteFieldRequest], context: Any
    ) -> pb.WriteFieldResponse:
        header: pb.WriteFieldHeader = await read_header(request_iterator, "WriteField")
        run = self._broker.run(header.run)
        allowed = run.state.spec.bytes_needed
        if header.size_bytes > allowed:
            raise InvalidInput(f"WriteField: {header.size_bytes} bytes came, {allowed} may", reason="OVERSIZE")
        payload = await read_chunks(request_iterator, header.size_bytes, "WriteField")
        await receive_field(run, header, payload)
        return pb.WriteFieldResponse()

    async def ReadRows(self, request: pb.ReadRowsRequest, context: Any) -> AsyncIterator[pb.ReadRowsResponse]:
        for chunk in chunks(await self._extent(request, context)):
            yield pb.ReadRowsResponse(chunk=chunk)

    async def FetchRows(self, request: pb.FetchRowsRequest, context: Any) -> pb.FetchRowsResponse:
        extent = await self._extent(request, context)
        return pb.FetchRowsResponse(size_bytes=len(extent), extent=extent if len(extent) <= CHUNK_BYTES else b"")

    async def _extent(self, request: pb.ReadRowsRequest | pb.FetchRowsRequest, context: HasDeadline) -> bytes:
        """The fields of planned rows, once all of them are written."""
        run, rows, plan = self._broker.run(request.run), wire.block_from(request.rows), request.plan
        state = run.state
        fields = [state.spec.field(name) for name in request.fields]

        def missing() -> list[str]:
            return [
                f"field {f.name} of step {plan.step}: role {f.writer} writes it" for f in unwritten(state, fields, rows)
            ]

        def ready() -> bool | None:
            reading.rows_of_plan(state, plan.lineage, plan.step, plan.generation, rows)
            return None if missing() else True

        def waits_for() -> list[tuple[str, str]]:
            consumer = reading.reader_of(state, request.fields)
            return [(consumer, f.name) for f in unwritten(state, fields, rows)]

        await run.waits.until(
            "ReadRows", f"step {plan.step}", ready, lambda: ", ".join(missing()), wait_end(context), waits_for
        )
        return encode(run.payload.gather(state, rows, request.fields))

    async def PutBlob(self, request_iterator: AsyncIterator[pb.PutBlobRequest], context: Any) -> pb.PutBlobResponse:
        header: pb.BlobHeader = await read_header(request_iterator, "PutBlob")
        run = self._broker.run(header.run)
        if header.size_bytes > BLOB_BYTES_MAX:
            raise InvalidInput(f"blob {header.hash}: {header.size_bytes} bytes, at most {BLOB_BYTES_MAX} are taken")
        content = await read_chunks(request_iterator, header.size_bytes, "PutBlob")
        await asyncio.to_thread(run.blobs.put, header.hash, content)
        return pb.PutBlobResponse()

    async def GetBlob(self, request: pb.GetBlobRequest, context: Any) -> AsyncIterator[pb.GetBlobResponse]:
        run = self._broker.run(request.run)
        for chunk in chunks(await asyncio.to_thread(run.blobs.get, request.hash)):
            yield pb.GetBlobResponse(chunk=chunk)
