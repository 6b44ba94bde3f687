"""Calls that carry payload: puts, reads, columns of roles, blobs."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import InvalidInput, Oversize, RelaxError, Unavailable
from relax_common.failpoints import failpoint
from relax_common.rpc.calls import ServicerContext
from relax_common.rpc.channels import CHUNK_BYTES
from relax_queue.broker import messages
from relax_queue.broker.broker import Broker
from relax_queue.broker.field_writes import receive_field
from relax_queue.broker.metrics import PUT_SECONDS
from relax_queue.broker.put_calls import receive_put
from relax_queue.broker.run_broker import RunBroker
from relax_queue.broker.transport_calls import TransportCalls, key_to
from relax_queue.broker.waits import wait_end
from relax_queue.rows.column_block import Layout, layout
from relax_queue.rows.row_keys import block_from
from relax_queue.rules import reading
from relax_queue.storage.payload import Located
from relax_queue.transport.frames import (
    ACCEPTED,
    INLINE_BYTES,
    RESPONSE_CHUNK,
    frames,
    read_raw_chunks,
    read_raw_header,
)
from relax_queue.transport.incoming import Incoming, IncomingSlab, Stored, inline, received
from relax_queue.transport.intake import Buffer, Landing
from relax_queue.transport.shm.arena import Slab
from relax_queue.transport.shm.slabs import Session, Slabs

BLOB_BYTES_MAX = 1 << 30
SLAB_BYTES_MAX = 1 << 30
OFF_LOOP_BYTES = 8 << 20
"""Hashing more than this would block the event loop for milliseconds."""


class PayloadCalls(TransportCalls):
    """The part of relax.queue.v1.QueueService that moves rows."""

    def __init__(self, broker: Broker, slabs: Slabs) -> None:
        super().__init__(slabs)
        self._broker = broker

    # Puts

    async def PutGroups(self, request: pb.PutGroupsRequest, context: ServicerContext) -> pb.PutGroupsResponse:
        end = wait_end(context)
        session = self._slabs.session(request.session) if request.session else None
        if session is not None:
            self._slabs.drop(session, ((key.offset, key.generation) for key in request.unused))
        if len(request.puts) == 1:
            results = [await self._put_group(request.puts[0], session, end)]
        else:
            # Concurrently: a put that waits for a version does not delay the others, and all share one fsync.
            results = await asyncio.gather(*(self._put_group(put, session, end) for put in request.puts))
        response = pb.PutGroupsResponse(results=results)
        if session is not None and request.next_slab_bytes:
            grant = self._slab(session, min(request.next_slab_bytes, SLAB_BYTES_MAX))
            if grant is not None:
                response.next.CopyFrom(grant)
        return response

    async def _put_group(self, put: pb.GroupPut, session: Session | None, end: float) -> pb.PutResult:
        incoming = None
        try:
            run = self._broker.run(put.header.run)
            _check_size(run, put.header.size_bytes, "Put")
            incoming = self._incoming(put, session)
            disposition = await self._put(run, put.header, incoming, end)
            return pb.PutResult(disposition=disposition, slab_taken=incoming.taken)
        except Unavailable:
            raise  # the client repeats all; puts that were stored get their stored answer
        except RelaxError as error:
            # Even a transaction that was undone on a full disk has taken the slab: its writer must not use it again.
            taken = incoming is not None and incoming.taken
            return pb.PutResult(refusal=messages.refusal_to(error), slab_taken=taken)

    def _incoming(self, put: pb.GroupPut, session: Session | None) -> Incoming:
        if put.WhichOneof("payload") != "slab":
            _check_size(self._broker.run(put.header.run), len(put.block), "Put")
            return inline(put.block, f"put for group {put.header.lease.group}")
        if session is None:
            raise InvalidInput("a put names a slab and no session")
        key = put.slab
        return IncomingSlab(self._slabs, session, key.offset, key.generation, put.header.size_bytes, put.digest)

    async def _put(self, run: RunBroker, header: pb.PutHeader, incoming: Incoming, end: float) -> str:
        begun = time.perf_counter()
        disposition = await receive_put(run, header, incoming, returns=False, end=end)
        failpoint("queue.after_put_logged")
        PUT_SECONDS.labels(header.run).observe(time.perf_counter() - begun)
        return disposition

    async def Put(self, request_iterator: AsyncIterator[bytes], context: ServicerContext) -> pb.PutResponse:
        header: pb.PutHeader = await read_raw_header(request_iterator, pb.PutRequest, "Put")
        run = self._broker.run(header.run)
        async with self._received(run, header, request_iterator, "Put", context) as incoming:
            return pb.PutResponse(disposition=await self._put(run, header, incoming, wait_end(context)))

    async def ReturnGroup(
        self, request_iterator: AsyncIterator[bytes], context: ServicerContext
    ) -> pb.ReturnGroupResponse:
        header: pb.PutHeader = await read_raw_header(request_iterator, pb.ReturnGroupRequest, "ReturnGroup")
        run = self._broker.run(header.run)
        if header.completes_group != pb.GROUP_OUTCOME_UNSPECIFIED:
            raise InvalidInput("ReturnGroup gives a group back; completes_group must not be set")
        async with self._received(run, header, request_iterator, "ReturnGroup", context) as incoming:
            await receive_put(run, header, incoming, returns=True, end=wait_end(context))
        return pb.ReturnGroupResponse()

    @asynccontextmanager
    async def _received(
        self, run: RunBroker, header: pb.PutHeader, chunks: AsyncIterator[bytes], what: str, context: ServicerContext
    ) -> AsyncIterator[Incoming]:
        _check_size(run, header.size_bytes, what)
        await context.send_initial_metadata((ACCEPTED,))
        landing = Landing(header.size_bytes, run.intake, what, self._slabs)
        try:
            pieces = read_raw_chunks(chunks, header.size_bytes, what)
            incoming = await received(pieces, header.size_bytes, self._slabs, landing)
            try:
                yield incoming
            finally:
                incoming.close()
        finally:
            landing.close()

    async def WriteField(
        self, request_iterator: AsyncIterator[bytes], context: ServicerContext
    ) -> pb.WriteFieldResponse:
        header: pb.WriteFieldHeader = await read_raw_header(request_iterator, pb.WriteFieldRequest, "WriteField")
        run = self._broker.run(header.run)
        allowed = run.state.spec.bytes_needed
        if header.size_bytes > allowed:
            raise Oversize(f"WriteField: {header.size_bytes} bytes were announced, at most {allowed} are allowed")
        async with _whole(run, request_iterator, header.size_bytes, "WriteField", context) as payload:
            await receive_field(run, header, payload)
        return pb.WriteFieldResponse()

    # Reads

    async def ReadRows(self, request: pb.ReadRowsRequest, context: ServicerContext) -> AsyncIterator[bytes]:
        run, located = await self._located(request, context)
        pinned = [slab for slab in _slabs(run, located).values() if slab is not None]
        for slab in pinned:  # rows that are freed during the read must not be overwritten
            self._slabs.pin(slab)
        try:
            for frame in frames(await _buffers(layout(run.payload.columns(located))), RESPONSE_CHUNK):
                yield frame
        finally:
            for slab in pinned:
                self._slabs.release(slab)

    async def FetchRows(self, request: pb.FetchRowsRequest, context: ServicerContext) -> pb.FetchRowsResponse:
        session = self._slabs.session(request.session) if request.session else None
        if session is not None:
            self._slabs.close_views(session, _offsets(request.closed_views))
        run, located = await self._located(request, context)
        homes = _slabs(run, located)
        slabs = [slab for slab in homes.values() if slab is not None]
        if session is not None and slabs and len(slabs) == len(homes):
            n_bytes = run.payload.n_bytes(located)
            if n_bytes > INLINE_BYTES:
                placed = self._placed(located, dict(zip(homes, slabs, strict=True)), session)
                return pb.FetchRowsResponse(size_bytes=n_bytes, placed=placed)
        block = layout(run.payload.columns(located))
        if block.size <= CHUNK_BYTES:
            return pb.FetchRowsResponse(size_bytes=block.size, block=block.joined())
        return pb.FetchRowsResponse(size_bytes=block.size)

    async def _located(
        self, request: pb.ReadRowsRequest | pb.FetchRowsRequest, context: ServicerContext
    ) -> tuple[RunBroker, list[Located]]:
        """The places of the fields of planned rows, once all of them are written."""
        run, rows, plan = self._broker.run(request.run), block_from(request.rows), request.plan
        state = run.state
        fields = [state.spec.field(name) for name in request.fields]

        def missing() -> list[str]:
            return [
                f"field {f.name} of step {plan.step}: role {f.writer} writes it"
                for f in run.payload.unwritten(state, rows, fields)
            ]

        def ready() -> list[Located] | None:
            reading.rows_of_plan(state, plan.lineage, plan.step, plan.generation, rows)
            return run.payload.locate_written(state, rows, fields)

        def waits_for() -> list[tuple[str, str]]:
            consumer = reading.reader_of(state, request.fields)
            return [(consumer, f.name) for f in run.payload.unwritten(state, rows, fields)]

        found = await run.waits.until(
            "ReadRows", f"step {plan.step}", ready, lambda: ", ".join(missing()), wait_end(context), waits_for
        )
        return run, found

    def _placed(self, located: list[Located], slabs: dict[int, Slab], session: Session) -> pb.PlacedRows:
        """Views of the slabs that contain the rows."""
        index = {block: i for i, block in enumerate(slabs)}
        for slab in slabs.values():
            self._slabs.show(session, slab)
        fields = [
            pb.PlacedFields(fields=[f.name for f in part.fields], spans=_spans_to(part, index)) for part in located
        ]
        return pb.PlacedRows(slabs=map(key_to, slabs.values()), fields=fields)

    # Blobs

    async def PutBlob(self, request_iterator: AsyncIterator[bytes], context: ServicerContext) -> pb.PutBlobResponse:
        header: pb.BlobHeader = await read_raw_header(request_iterator, pb.PutBlobRequest, "PutBlob")
        run = self._broker.run(header.run)
        if header.size_bytes > BLOB_BYTES_MAX:
            raise InvalidInput(f"blob {header.hash}: {header.size_bytes} bytes, at most {BLOB_BYTES_MAX} are allowed")
        async with _whole(run, request_iterator, header.size_bytes, "PutBlob", context) as content:
            await asyncio.to_thread(run.blobs.put, header.hash, content)
        return pb.PutBlobResponse()

    async def GetBlob(self, request: pb.GetBlobRequest, context: ServicerContext) -> AsyncIterator[bytes]:
        run = self._broker.run(request.run)
        for frame in frames([await asyncio.to_thread(run.blobs.get, request.hash)], RESPONSE_CHUNK):
            yield frame


def _check_size(run: RunBroker, size_bytes: int, what: str) -> None:
    allowed = run.state.spec.bytes_per_group
    if size_bytes > allowed:
        raise Oversize(f"{what}: {size_bytes} bytes announced, a group may hold {allowed}")


@asynccontextmanager
async def _whole(
    run: RunBroker, chunks: AsyncIterator[bytes], size_bytes: int, what: str, context: ServicerContext
) -> AsyncIterator[Buffer]:
    await context.send_initial_metadata((ACCEPTED,))
    landing = Landing(size_bytes, run.intake, what)
    try:
        async for chunk in read_raw_chunks(chunks, size_bytes, what):
            landing.add(chunk)
        yield landing.content
    finally:
        landing.close()


async def _buffers(block: Layout) -> list[memoryview]:
    if block.size <= OFF_LOOP_BYTES:
        return block.buffers()
    return await asyncio.to_thread(block.buffers)


def _slabs(run: RunBroker, located: list[Located]) -> dict[int, Slab | None]:
    """The blocks that hold the rows, in order of first use, each with its slab if it has one."""
    homes = {block: run.payload.block(block).home for part in located for block, _, _ in part.spans}
    return {block: home.slab if isinstance(home, Stored) else None for block, home in homes.items()}


def _offsets(packed: bytes) -> list[int]:
    if len(packed) % 8:
        raise InvalidInput(f"closed_views has {len(packed)} bytes, which is not a whole number of uint64")
    offsets: list[int] = np.frombuffer(packed, "<u8").tolist()
    return offsets


def _spans_to(part: Located, index: dict[int, int]) -> bytes:
    return np.array([(index[block], start, end) for block, start, end in part.spans], "<i4").tobytes()
