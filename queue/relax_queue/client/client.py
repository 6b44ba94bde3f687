"""Client of the queue for threads: rollout servers lease and put, trainer ranks read plans and rows.

Every method has a deadline. Calls whose key makes a repeat harmless are repeated while the queue is UNAVAILABLE; errors
are those of relax_common.errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc
import xxhash

from relax.queue.v1 import queue_pb2 as pb
from relax.queue.v1 import queue_pb2_grpc
from relax_common.errors import DeadlineExceeded, from_rpc
from relax_common.rows import Field, RowKey
from relax_common.rpc.channels import call_with_retry, sync_channel
from relax_queue.client.lane import LaneName
from relax_queue.client.plans import (
    PlanAnswer,
    PlannedChunk,
    PlannedMicrobatch,
    StepClosing,
)
from relax_queue.client.rows_client import CALL_SECONDS, RowsClient
from relax_queue.rows.column_block import Column, decode, encode, layout, ragged
from relax_queue.rows.row_keys import RowKeys, block_to, join_keys, keys_of, keys_of_samples
from relax_queue.rows.schema import ROW_FIELDS, to_columns

__all__ = [
    "CALL_SECONDS",
    "ROW_FIELDS",
    "Column",
    "Field",
    "PlanAnswer",
    "PlannedChunk",
    "PlannedMicrobatch",
    "QueueClient",
    "RowKey",
    "RowKeys",
    "StepClosing",
    "block_to",
    "decode",
    "encode",
    "join_keys",
    "keys_of",
    "keys_of_samples",
    "ragged",
    "to_columns",
]


class QueueClient:
    """One run at one queue. Thread-safe."""

    def __init__(self, address: str, run: str, lane: LaneName = "auto") -> None:
        self._channel = sync_channel(address)
        self._rows = RowsClient(self._channel, run, lane)
        self._stub = queue_pb2_grpc.QueueServiceStub(self._channel)
        self.run = run

    def close(self) -> None:
        self._rows.close()
        self._channel.close()

    @property
    def lane(self) -> str:
        """How payload travels, for people."""
        return self._rows.lane

    def _call(self, method: Any, request: Any, what: str, seconds: float = CALL_SECONDS) -> Any:
        return call_with_retry(
            lambda left: method(request, timeout=left), what=f"the queue ({what})", deadline_seconds=seconds
        )

    # Runs

    def open_run(self, spec: pb.RunSpec, recipe_digest: str, dcs_address: str) -> pb.OpenRunResponse:
        request = pb.OpenRunRequest(run=self.run, recipe_digest=recipe_digest, spec=spec, dcs_address=dcs_address)
        response: pb.OpenRunResponse = self._call(self._stub.OpenRun, request, "OpenRun")
        return response

    def register_term(self, holder: str, term: int) -> None:
        self._call(
            self._stub.RegisterTerm, pb.RegisterTermRequest(run=self.run, holder=holder, term=term), "RegisterTerm"
        )

    def seal(self) -> None:
        self._call(self._stub.SealRun, pb.SealRunRequest(run=self.run), "SealRun")

    def end(self) -> pb.LedgerCounts:
        response: pb.EndRunResponse = self._call(self._stub.EndRun, pb.EndRunRequest(run=self.run), "EndRun")
        return response.counts

    def status(self) -> pb.RunStatus:
        request = pb.GetStatusRequest(run=self.run)
        response: pb.GetStatusResponse = self._call(self._stub.GetStatus, request, "GetStatus")
        return response.runs[0]

    def inspect(self, group: str) -> pb.InspectResponse:
        request = pb.InspectRequest(run=self.run, group=group)
        response: pb.InspectResponse = self._call(self._stub.Inspect, request, "Inspect")
        return response

    def partitions(self) -> list[pb.Partition]:
        response: pb.ListPartitionsResponse = self._call(
            self._stub.ListPartitions, pb.ListPartitionsRequest(run=self.run), "ListPartitions"
        )
        return list(response.partitions)

    # Groups

    def offer_groups(self, groups: Sequence[pb.PromptGroup], term: int, after_dcs_revision: int = 0) -> tuple[int, int]:
        """(new, known before). Waits until the broker has applied `after_dcs_revision`."""
        request = pb.OfferGroupsRequest(run=self.run, groups=groups, after_dcs_revision=after_dcs_revision, term=term)
        response: pb.OfferGroupsResponse = self._call(self._stub.OfferGroups, request, "OfferGroups")
        return response.accepted, response.known

    def lease_groups(
        self, server: str, term: int, credits: int, wait_seconds: float
    ) -> Iterator[pb.LeaseGroupsResponse]:
        """Up to `credits` leases as they are granted. After `wait_seconds` it ends; DeadlineExceeded names what was
        missing if none was granted.

        Not repeated when the connection breaks: a grant that was lost on the way runs out by its TTL.
        """
        request = pb.LeaseGroupsRequest(run=self.run, server=server, term=term, credits=credits)
        stream = self._stub.LeaseGroups(request, timeout=wait_seconds)
        granted = 0
        try:
            for response in stream:
                granted += 1
                yield response
        except grpc.RpcError as rpc_error:
            error = from_rpc(rpc_error)
            if not (granted and isinstance(error, DeadlineExceeded)):
                raise error from rpc_error
        finally:
            stream.cancel()

    def renew_leases(self, server: str, term: int, leases: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Extend leases named (group, attempt); those that are gone: stop working on them."""
        keys = [pb.LeaseKey(group=group, attempt=attempt) for group, attempt in leases]
        request = pb.RenewLeasesRequest(run=self.run, server=server, term=term, leases=keys)
        response: pb.RenewLeasesResponse = self._call(self._stub.RenewLeases, request, "RenewLeases")
        return [(key.group, key.attempt) for key in response.gone]

    def put(self, header: pb.PutHeader, columns: Mapping[str, Column]) -> str:
        """Store whole samples and, with completes_group, complete the group; "accepted", "dropped" or "sent_back".

        Samples that an earlier lease left are replaced. `header.size_bytes` is filled in here.
        """
        return self._rows.put(header, columns)

    def return_group(self, header: pb.PutHeader, columns: Mapping[str, Column]) -> None:
        """Give a group back to the front of the line together with the whole samples in `columns`, if any."""
        payload = layout(columns) if header.rows.runs else None
        header.size_bytes = payload.size if payload else 0
        self._rows.send("return_frames", header, pb.ReturnGroupRequest, payload.buffers() if payload else ())

    def write_field(self, role: str, term: int, field: str, rows: Sequence[RowKey], column: Column) -> None:
        """Add a role's column to rows; sample- and group-scoped values by first appearance."""
        payload = layout({field: column})
        header = pb.WriteFieldHeader(
            run=self.run, role=role, term=term, field=field, rows=block_to(rows), size_bytes=payload.size
        )
        self._rows.send("write_frames", header, pb.WriteFieldRequest, payload.buffers())

    # Plans and rows

    def get_plan(
        self,
        consumer: str,
        term: int,
        lineage: int,
        step: int,
        chunk: int,
        generation: int = 0,
        wait_seconds: float = CALL_SECONDS,
    ) -> PlanAnswer:
        """A chunk of a step, or its closing, or the end of the run. DeadlineExceeded names what is missing."""
        request = pb.GetPlanRequest(
            run=self.run, consumer=consumer, term=term, lineage=lineage, step=step, chunk=chunk, generation=generation
        )
        return self._rows.plan(request, wait_seconds)

    def read_rows(
        self, plan: pb.PlanKey, rows: Sequence[RowKey], fields: Sequence[str], wait_seconds: float = CALL_SECONDS
    ) -> dict[str, Column]:
        """Columns over `rows`, samples and groups by first appearance; read-only, where possible the queue's memory.

        DeadlineExceeded names the fields that nobody has written yet.
        """
        return self._rows.read(plan, rows, fields, wait_seconds)

    # Blobs and events

    def put_blob(self, content: bytes) -> str:
        """Store a blob; its hash."""
        name = xxhash.xxh3_128_hexdigest(content)
        header = pb.BlobHeader(run=self.run, hash=name, size_bytes=len(content))
        self._rows.send("blob_frames", header, pb.PutBlobRequest, [content])
        return name

    def get_blob(self, name: str) -> bytes:
        return self._rows.read_blob(name)

    def watch_events(self, after_revision: int, wait_seconds: float) -> Iterator[pb.WatchEventsResponse]:
        """Events behind a revision, then each new one; ends with the run or once `wait_seconds` have passed."""
        request = pb.WatchEventsRequest(run=self.run, after_revision=after_revision)
        stream = self._stub.WatchEvents(request, timeout=wait_seconds)
        try:
            yield from stream
        except grpc.RpcError as rpc_error:
            error = from_rpc(rpc_error)
            if not isinstance(error, DeadlineExceeded):
                raise error from rpc_error
        finally:
            stream.cancel()
