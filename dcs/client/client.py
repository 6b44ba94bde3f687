"""Client of dcs for threads: trainer ranks publish and snapshot, rollout servers follow, pull and confirm.

On the host of dcs, weights and states are handed over in sealed memory, which both sides map; elsewhere they are sent.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import grpc
import xxhash

from dcs.transport.places import place_from_proto, place_to_proto
from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc
from relax_common.errors import DataLoss, MemoryOutOfReach, Unavailable, from_rpc
from relax_common.process.logs import get_logger
from relax_common.rpc.channels import CHUNK_BYTES, Backoff, call_with_retry, sync_channel
from relax_common.rpc.streams import chunks
from relax_common.storage.sealed_memory import Buffer, SealedMemory, open_sealed, sealed
from relax_common.versions import PolicyVersion

CALL_SECONDS = 60.0
"""How long a call is repeated while dcs is away before the wait is reported by name."""

BULK_SECONDS = 600.0
"""Deadline of one transfer of weights or state."""


@dataclass(frozen=True)
class SliceData:
    """A hyper-rectangle of a parameter with its bytes (C order)."""

    name: str
    full_shape: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]
    dtype: str
    """safetensors name, for example F32 or BF16."""
    data: bytes | memoryview

    def to_proto(self) -> dcs_pb2.Slice:
        size = self.data.nbytes if isinstance(self.data, memoryview) else len(self.data)
        return dcs_pb2.Slice(
            name=self.name,
            full_shape=self.full_shape,
            start=self.start,
            extent=self.extent,
            dtype=self.dtype,
            hash=xxhash.xxh3_64_intdigest(self.data),
            size_bytes=size,
        )


@dataclass(frozen=True)
class Head:
    """State of a run's log as GetHead gave it."""

    head: PolicyVersion | None
    lineage: int
    recovery: PolicyVersion
    recovery_in_memory: bool
    holds_head_bytes: bool
    record: dcs_pb2.CommitRecord
    revision: int
    line: tuple[PolicyVersion, ...]

    @staticmethod
    def from_message(message: dcs_pb2.GetHeadResponse) -> Head:
        return Head(
            head=PolicyVersion.from_proto(message.head) if message.has_head else None,
            lineage=message.lineage,
            recovery=PolicyVersion.from_proto(message.recovery),
            recovery_in_memory=message.recovery_in_memory,
            holds_head_bytes=message.holds_head_bytes,
            record=message.head_record,
            revision=message.revision,
            line=tuple(PolicyVersion.from_proto(v) for v in message.line),
        )

    def next_version(self) -> PolicyVersion:
        return PolicyVersion(self.lineage, 0 if self.head is None else self.head.number + 1)


class DcsClient:
    """Every method is idempotent and repeats while dcs is UNAVAILABLE; errors are relax_common.errors."""

    def __init__(self, address: str, run: str, *, share_memory: bool = True) -> None:
        """`share_memory`: try it; where dcs turns out to be on another host, everything is sent from then on."""
        self._share_memory = share_memory
        self._channel = sync_channel(address)
        self._stub = dcs_pb2_grpc.DcsServiceStub(self._channel)
        self._address = address
        self.run = run

    def close(self) -> None:
        self._channel.close()

    def register_term(self, holder: str, term: int) -> None:
        request = dcs_pb2.RegisterTermRequest(run=self.run, holder=holder, term=term)
        call_with_retry(
            lambda s: self._stub.RegisterTerm(request, timeout=s),
            what=f"dcs {self._address} to register term {term} of {holder}",
            deadline_seconds=CALL_SECONDS,
        )

    def head(self) -> Head:
        return Head.from_message(self.head_message())

    def head_message(self) -> dcs_pb2.GetHeadResponse:
        """The head as it came, for ranks that pass it on to each other."""
        request = dcs_pb2.GetHeadRequest(run=self.run)
        message: dcs_pb2.GetHeadResponse = call_with_retry(
            lambda s: self._stub.GetHead(request, timeout=s),
            what=f"dcs {self._address} to tell the head of {self.run}",
            deadline_seconds=CALL_SECONDS,
        )
        return message

    def begin(self, model: str, version: PolicyVersion, term: int) -> int:
        """Returns the attempt. Raises Precondition where `version` is not the next one, StaleTerm for an old term."""
        request = dcs_pb2.BeginVersionRequest(run=self.run, model=model, version=version.to_proto(), term=term)
        response = call_with_retry(
            lambda s: self._stub.BeginVersion(request, timeout=s),
            what=f"dcs {self._address} to begin version {version}",
            deadline_seconds=CALL_SECONDS,
        )
        return int(response.attempt)

    def push(self, version: PolicyVersion, attempt: int, term: int, slices: Sequence[SliceData]) -> None:
        """Raises NotFound with reason ATTEMPT_GONE where dcs has restarted meanwhile: begin again."""
        header = dcs_pb2.PushHeader(
            run=self.run,
            version=version.to_proto(),
            attempt=attempt,
            term=term,
            slices=[entry.to_proto() for entry in slices],
        )

        def frames(memory: SealedMemory | None) -> Iterator[dcs_pb2.PushSlicesRequest]:
            _set_memory(header, memory)
            yield dcs_pb2.PushSlicesRequest(header=header)
            if memory is None:
                for chunk in joined_chunks(entry.data for entry in slices):
                    yield dcs_pb2.PushSlicesRequest(chunk=chunk)

        self._hand_over(
            [entry.data for entry in slices],
            lambda memory, s: self._stub.PushSlices(frames(memory), timeout=max(s, BULK_SECONDS)),
            what=f"dcs {self._address} to take slices of version {version}",
        )

    def _hand_over(
        self, parts: Sequence[Buffer], call: Callable[[SealedMemory | None, float], object], what: str
    ) -> None:
        if self._share_memory:
            memory = sealed(parts)
            try:
                call_with_retry(lambda s: call(memory, s), what=what, deadline_seconds=CALL_SECONDS)
                return
            except MemoryOutOfReach as error:
                self._send_from_now_on(error.message)
        call_with_retry(lambda s: call(None, s), what=what, deadline_seconds=CALL_SECONDS)

    def _send_from_now_on(self, why: str) -> None:
        get_logger().info("dcs_shares_no_memory", dcs=self._address, why=why)
        self._share_memory = False

    def commit(self, record: dcs_pb2.CommitRecord) -> dcs_pb2.CommitRecord:
        """The commit point. A lost answer is asked for again: the stored record, or NotFound (ATTEMPT_GONE)."""
        request = dcs_pb2.CommitVersionRequest(run=self.run, record=record)
        response = call_with_retry(
            lambda s: self._stub.CommitVersion(request, timeout=s),
            what=f"dcs {self._address} to commit version {record.version.number}",
            deadline_seconds=CALL_SECONDS,
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

        def frames(memory: SealedMemory | None) -> Iterator[dcs_pb2.PutRecoverySnapshotRequest]:
            _set_memory(header, memory)
            yield dcs_pb2.PutRecoverySnapshotRequest(header=header)
            if memory is None:
                for chunk in joined_chunks(state):
                    yield dcs_pb2.PutRecoverySnapshotRequest(chunk=chunk)

        self._hand_over(
            state,
            lambda memory, s: self._stub.PutRecoverySnapshot(frames(memory), timeout=max(s, BULK_SECONDS)),
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

        return call_with_retry(
            read, what=f"dcs {self._address} to give the state of {role} rank {rank}", deadline_seconds=CALL_SECONDS
        )

    def manifest(self, version: PolicyVersion) -> list[dcs_pb2.Slice]:
        """Raises Precondition with reason BYTES_LOST where dcs does not hold the version."""
        return list(self._manifest(version).slices)

    def _manifest(self, version: PolicyVersion) -> dcs_pb2.GetManifestResponse:
        request = dcs_pb2.GetManifestRequest(run=self.run, version=version.to_proto())
        response: dcs_pb2.GetManifestResponse = call_with_retry(
            lambda s: self._stub.GetManifest(request, timeout=s),
            what=f"dcs {self._address} to list version {version}",
            deadline_seconds=CALL_SECONDS,
        )
        return response

    def pull(self, version: PolicyVersion) -> list[tuple[dcs_pb2.Slice, memoryview]]:
        """All slices of a committed version, each verified by its hash. They lie in the memory of dcs where that is on
        this host, else they are sent; a stream that broke goes on at its byte. Writing to them changes them for this
        process alone."""
        mapped = self._mapped(version) if self._share_memory else None
        return self._streamed(version) if mapped is None else mapped

    def _mapped(self, version: PolicyVersion) -> list[tuple[dcs_pb2.Slice, memoryview]] | None:
        """None where dcs is on another host, or has dropped the version since it listed it."""
        listed = self._manifest(version)
        try:
            memories = [open_sealed(place_from_proto(place)) for place in listed.memories]
        except OSError as error:
            if error.errno != errno.ENOENT:  # a descriptor that was closed meanwhile says nothing of the next version
                self._send_from_now_on(str(error))
            return None
        result: list[tuple[dcs_pb2.Slice, memoryview]] = []
        for entry, at in zip(listed.slices, listed.offsets, strict=True):
            data = memories[at.memory].private[at.offset : at.offset + entry.size_bytes]
            if xxhash.xxh3_64_intdigest(data) != entry.hash:
                return None
            result.append((entry, data))
        return result

    def _streamed(self, version: PolicyVersion) -> list[tuple[dcs_pb2.Slice, memoryview]]:
        entries: list[dcs_pb2.Slice] = []
        received = bytearray()

        def read(seconds: float) -> None:
            request = dcs_pb2.PullSlicesRequest(run=self.run, version=version.to_proto(), offset=len(received))
            stream = self._stub.PullSlices(request, timeout=max(seconds, BULK_SECONDS))
            try:
                if not entries:
                    entries.extend(self.manifest(version))  # while the first bytes travel
                for frame in stream:
                    received.extend(frame.chunk)
            finally:
                stream.cancel()  # ends nothing where all has arrived

        call_with_retry(read, what=f"dcs {self._address} to send version {version}", deadline_seconds=CALL_SECONDS)
        return _cut(entries, memoryview(received), version)

    def confirm(self, server: str, term: int, version: PolicyVersion) -> int:
        """Record that `server` serves `version`, verified; returns the log revision."""
        record = dcs_pb2.ConfirmedRecord(server=server, term=term, version=version.to_proto())
        request = dcs_pb2.ConfirmServedRequest(run=self.run, record=record)
        response = call_with_retry(
            lambda s: self._stub.ConfirmServed(request, timeout=s),
            what=f"dcs {self._address} to record that {server} serves {version}",
            deadline_seconds=CALL_SECONDS,
        )
        return int(response.revision)

    def watch_log(self, after_revision: int, deadline_seconds: float) -> Iterator[dcs_pb2.LogRecord]:
        """Durable records behind a revision, then each new one; reconnects; ends at the deadline."""
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


def joined_chunks(parts: Iterable[Buffer]) -> Iterator[bytes]:
    """The concatenation of many small parts in frames of at most CHUNK_BYTES."""
    pending: list[bytes] = []
    size = 0
    for part in parts:
        for piece in chunks(part):
            if size + len(piece) > CHUNK_BYTES:
                yield b"".join(pending)
                pending, size = [], 0
            pending.append(piece)
            size += len(piece)
    if pending:
        yield b"".join(pending)


def _set_memory(header: dcs_pb2.PushHeader | dcs_pb2.SnapshotHeader, memory: SealedMemory | None) -> None:
    if memory is None:
        header.ClearField("memory")
    else:
        header.memory.CopyFrom(place_to_proto(memory.place()))


def _cut(
    entries: list[dcs_pb2.Slice], payload: memoryview, version: PolicyVersion
) -> list[tuple[dcs_pb2.Slice, memoryview]]:
    total = sum(entry.size_bytes for entry in entries)
    if total != len(payload):
        raise DataLoss(f"version {version}: {len(payload)} of {total} bytes arrived")
    result: list[tuple[dcs_pb2.Slice, memoryview]] = []
    offset = 0
    for entry in entries:
        data = payload[offset : offset + entry.size_bytes]
        offset += entry.size_bytes
        if xxhash.xxh3_64_intdigest(data) != entry.hash:
            raise DataLoss(f"version {version}: slice of {entry.name} does not match its hash")
        result.append((entry, data))
    return result
