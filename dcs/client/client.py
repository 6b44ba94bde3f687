"""Client of dcs for threads: trainer ranks publish and snapshot, rollout servers follow, pull and confirm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import grpc
import xxhash

from dcs.client.source import BULK_SECONDS, VersionSource
from dcs.client.values import Head, SliceData
from dcs.transport import TRANSPORTS, NotNow, Offer
from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc
from relax_common.errors import DataLoss, MemoryOutOfReach, Unavailable, from_rpc
from relax_common.process.telemetry import get_logger
from relax_common.rpc.channels import Backoff, call_with_retry, sync_channel
from relax_common.storage.sealed_memory import Buffer
from relax_common.versions import PolicyVersion

T = TypeVar("T")

CALL_SECONDS = 60.0
"""How long a call is repeated while dcs is away, or waits for its disk, before the wait is reported by name."""


class DcsClient:
    """Every method is idempotent and repeats while dcs is UNAVAILABLE; errors are relax_common.errors."""

    def __init__(
        self,
        address: str,
        run: str,
        *,
        transports: Sequence[str] = tuple(TRANSPORTS),
        on_wait: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`transports` are tried in this order; one that cannot reach dcs is not tried again. The last one must reach
        any host. `on_wait` is told why a call is repeated."""
        self._on_wait = on_wait
        self._transports = [TRANSPORTS[name] for name in transports]
        self._channel = sync_channel(address)
        self._stub = dcs_pb2_grpc.DcsServiceStub(self._channel)
        self._address = address
        self.run = run

    def close(self) -> None:
        self._channel.close()

    def _call(self, call: Callable[[float], T], what: str) -> T:
        return call_with_retry(call, what=what, deadline_seconds=CALL_SECONDS, on_wait=self._on_wait)

    def register_term(self, holder: str, term: int) -> None:
        request = dcs_pb2.RegisterTermRequest(run=self.run, holder=holder, term=term)
        self._call(
            lambda s: self._stub.RegisterTerm(request, timeout=s),
            what=f"dcs {self._address} to register term {term} of {holder}",
        )

    def head(self) -> Head:
        return Head.from_message(self.head_message())

    def head_message(self) -> dcs_pb2.GetHeadResponse:
        """The head as it was received, for ranks that pass it on to each other."""
        request = dcs_pb2.GetHeadRequest(run=self.run)
        message: dcs_pb2.GetHeadResponse = self._call(
            lambda s: self._stub.GetHead(request, timeout=s),
            what=f"dcs {self._address} to tell the head of {self.run}",
        )
        return message

    def begin(self, model: str, version: PolicyVersion, term: int) -> int:
        """Returns the attempt. Raises Precondition where `version` is not the next one, StaleTerm for an old term."""
        request = dcs_pb2.BeginVersionRequest(run=self.run, model=model, version=version.to_proto(), term=term)
        response = self._call(
            lambda s: self._stub.BeginVersion(request, timeout=s),
            what=f"dcs {self._address} to begin version {version}",
        )
        return int(response.attempt)

    def push(self, version: PolicyVersion, attempt: int, term: int, slices: Sequence[SliceData]) -> None:
        """Raises AttemptGone if dcs has restarted since: begin again."""
        header = dcs_pb2.PushHeader(
            run=self.run,
            version=version.to_proto(),
            attempt=attempt,
            term=term,
            slices=[entry.to_proto() for entry in slices],
        )

        def frames(transport: str, offer: Offer) -> Iterator[dcs_pb2.PushSlicesRequest]:
            _set_handover(header, transport, offer)
            yield dcs_pb2.PushSlicesRequest(header=header)
            for chunk in offer.chunks():
                yield dcs_pb2.PushSlicesRequest(chunk=chunk)

        self._hand_over(
            [entry.data for entry in slices],
            lambda transport, offer, s: self._stub.PushSlices(frames(transport, offer), timeout=max(s, BULK_SECONDS)),
            what=f"dcs {self._address} to take slices of version {version}",
        )

    def _hand_over(self, parts: Sequence[Buffer], call: Callable[[str, Offer, float], object], what: str) -> None:
        while True:
            transport = self._transports[0]
            offer = transport.offer(parts)
            try:
                self._call(partial(call, transport.name, offer), what=what)
                return
            except MemoryOutOfReach as error:
                self._give_up_transport(error)

    def _give_up_transport(self, why: MemoryOutOfReach) -> None:
        """Drop the first transport, unless it is the only one left."""
        if len(self._transports) == 1:
            raise why
        given_up = self._transports.pop(0)
        get_logger().info("dcs_out_of_reach", dcs=self._address, transport=given_up.name, why=why.message)

    def commit(self, record: dcs_pb2.CommitRecord) -> dcs_pb2.CommitRecord:
        """The commit point. If the answer is lost, a repeat returns the stored record, or NotFound (ATTEMPT_GONE)."""
        request = dcs_pb2.CommitVersionRequest(run=self.run, record=record)
        response = self._call(
            lambda s: self._stub.CommitVersion(request, timeout=s),
            what=f"dcs {self._address} to commit version {record.version.number}",
        )
        stored: dcs_pb2.CommitRecord = response.record
        return stored

    def put_snapshot(
        self, version: PolicyVersion, attempt: int, role: str, rank: int, term: int, state: Sequence[Buffer]
    ) -> None:
        """Keep a rank's whole state of `version`, in parts, under the attempt that makes (or made) it."""
        digest = xxhash.xxh3_64()
        for part in state:
            digest.update(part)
        header = dcs_pb2.SnapshotHeader(
            run=self.run,
            version=version.to_proto(),
            attempt=attempt,
            role=role,
            rank=rank,
            term=term,
            size_bytes=sum(memoryview(part).nbytes for part in state),
            hash=digest.intdigest(),
        )

        def frames(transport: str, offer: Offer) -> Iterator[dcs_pb2.PutRecoverySnapshotRequest]:
            _set_handover(header, transport, offer)
            yield dcs_pb2.PutRecoverySnapshotRequest(header=header)
            for chunk in offer.chunks():
                yield dcs_pb2.PutRecoverySnapshotRequest(chunk=chunk)

        self._hand_over(
            state,
            lambda transport, offer, s: self._stub.PutRecoverySnapshot(
                frames(transport, offer), timeout=max(s, BULK_SECONDS)
            ),
            what=f"dcs {self._address} to keep the state of {role} rank {rank}",
        )

    def get_snapshot(self, version: PolicyVersion, role: str, rank: int) -> bytes:
        """Raises NotFound where dcs does not hold it, DataLoss where bytes do not match their hash."""
        request = dcs_pb2.GetRecoverySnapshotRequest(run=self.run, version=version.to_proto(), role=role, rank=rank)

        def read(seconds: float) -> bytes:
            stream = self._stub.GetRecoverySnapshot(request, timeout=max(seconds, BULK_SECONDS))
            header = next(stream).header
            state = b"".join(frame.chunk for frame in stream)
            if len(state) != header.size_bytes or xxhash.xxh3_64_intdigest(state) != header.hash:
                raise DataLoss(f"state of {role} rank {rank} for version {version} arrived damaged")
            return state

        return self._call(read, what=f"dcs {self._address} to give the state of {role} rank {rank}")

    def manifest(self, version: PolicyVersion) -> list[dcs_pb2.Slice]:
        """Raises BytesLost where dcs does not hold the version."""
        return list(self._list(version, "").slices)

    def _list(self, version: PolicyVersion, transport: str) -> dcs_pb2.GetManifestResponse:
        request = dcs_pb2.GetManifestRequest(run=self.run, version=version.to_proto(), transport=transport)
        response: dcs_pb2.GetManifestResponse = self._call(
            lambda s: self._stub.GetManifest(request, timeout=s),
            what=f"dcs {self._address} to list version {version}",
        )
        return response

    def pull(self, version: PolicyVersion) -> list[tuple[dcs_pb2.Slice, memoryview]]:
        """All slices of a committed version, by the first transport that reaches dcs. Hashes are for the consumer to
        check (`FULL.decode`). Writing to the bytes changes them for this process alone."""
        for transport in tuple(self._transports):
            listed = partial(self._list, version, transport.name)
            source = VersionSource(self._stub, self.run, version, listed, CALL_SECONDS)
            try:
                return list(zip(source.entries, transport.fetch(source), strict=True))
            except MemoryOutOfReach as error:
                self._give_up_transport(error)
            except NotNow:
                continue
        raise Unavailable(f"version {version} cannot be fetched from dcs {self._address} at the moment")

    def confirm(self, server: str, term: int, version: PolicyVersion) -> int:
        """Record that `server` serves `version`, verified; returns the log revision."""
        record = dcs_pb2.ConfirmedRecord(server=server, term=term, version=version.to_proto())
        request = dcs_pb2.ConfirmServedRequest(run=self.run, record=record)
        response = self._call(
            lambda s: self._stub.ConfirmServed(request, timeout=s),
            what=f"dcs {self._address} to record that {server} serves {version}",
        )
        return int(response.revision)

    def watch_log(self, after_revision: int, deadline_seconds: float) -> Iterator[dcs_pb2.LogRecord]:
        """Durable records after a revision, then each new one; reconnects; ends at the deadline."""
        end = time.monotonic() + deadline_seconds
        position = after_revision
        backoff = Backoff()
        while (left := end - time.monotonic()) > 0:
            request = dcs_pb2.WatchLogRequest(run=self.run, after_revision=position)
            try:
                for response in self._stub.WatchLog(request, timeout=left):
                    backoff = Backoff()
                    position = response.record.revision
                    yield response.record
            except grpc.RpcError as rpc_error:
                error = from_rpc(rpc_error)
                if error.code == grpc.StatusCode.DEADLINE_EXCEEDED:
                    return
                if not isinstance(error, Unavailable):
                    raise error from rpc_error
                get_logger().warning("log_stream_broken", dcs=self._address, error=error.message)
                time.sleep(backoff.next_seconds())


def _set_handover(header: dcs_pb2.PushHeader | dcs_pb2.SnapshotHeader, transport: str, offer: Offer) -> None:
    if offer.place is None:
        header.ClearField("handover")
    else:
        header.handover.CopyFrom(dcs_pb2.Handover(transport=transport, place=offer.place))
