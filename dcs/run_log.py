"""One run at dcs: its durable log and its bytes in memory, joined by the commit protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from dcs.checkpoints.saver import Checkpoints
from dcs.checkpoints.writer import Content
from dcs.rules.line import POLICY, Line
from dcs.rules.manifest import check_complete, check_slice, manifest_hash, schema_of
from dcs.store import HeldVersion, MemoryStore, Part, SnapshotKey, snapshot_key
from relax.dcs.v1 import dcs_pb2
from relax_common.errors import (
    AlreadyExists,
    AttemptGone,
    BytesLost,
    Exhausted,
    InvalidInput,
    ManifestMismatch,
    NotFound,
    Precondition,
    SnapshotMissing,
)
from relax_common.failpoints import failpoint
from relax_common.storage.framed_log import FramedLog
from relax_common.storage.sealed_memory import SealedMemory
from relax_common.versions import PolicyVersion

# First byte of a frame: what follows.
_OPEN, _RECORD, _TERM, _BOOT, _SCHEMA = b"O", b"R", b"T", b"B", b"S"
_ATTEMPTS_PER_BOOT_BITS = 32


class Run:
    """State changes happen between two awaits; an answer waits for the fsync of everything it rests on."""

    def __init__(self, path: Path) -> None:
        self.line = Line()
        self.records: list[dcs_pb2.LogRecord] = []
        self.spec: dcs_pb2.OpenRunRequest | None = None
        self._durable_revision = 0
        self._changed = asyncio.Condition()
        self._log = FramedLog(path)
        self._boots = 0
        self._attempts = 0
        self._schema: dict[str, tuple[int, ...]] | None = None
        for frame in self._log.replay():
            self._replay(frame)
        self._durable_revision = self.line.revision
        self._log.append(_BOOT)
        self._boots += 1
        self.store = MemoryStore(self.spec.memory_budget_bytes if self.spec else 0)
        self.checkpoints: Checkpoints | None = None
        if self.spec is not None:
            self._open_checkpoints(self.spec)

    def _replay(self, frame: bytes) -> None:
        kind, body = frame[:1], frame[1:]
        if kind == _OPEN:
            self.spec = dcs_pb2.OpenRunRequest.FromString(body)
        elif kind == _BOOT:
            self._boots += 1
        elif kind == _TERM:
            term = dcs_pb2.RegisterTermRequest.FromString(body)
            self.line.apply_term(term.holder, term.term)
        elif kind == _SCHEMA:
            self._schema = schema_of(dcs_pb2.GetManifestResponse.FromString(body).slices)
        else:
            record = dcs_pb2.LogRecord.FromString(body)
            self.line.apply(record)
            self.records.append(record)

    async def open(self, request: dcs_pb2.OpenRunRequest) -> None:
        if self.spec is None:
            if not request.memory_budget_bytes or not request.snapshot_every or not request.snapshot_ranks:
                raise InvalidInput("OpenRun needs memory_budget_bytes, snapshot_every and snapshot_ranks")
            self.spec = request
            self.store.budget_bytes = request.memory_budget_bytes
            self._open_checkpoints(request)
            self._log.append(_OPEN + request.SerializeToString())
        elif self.spec != request:
            raise AlreadyExists(f"run {request.run} is open with other sizes")
        await self._log.sync()

    def _open_checkpoints(self, spec: dcs_pb2.OpenRunRequest) -> None:
        if spec.checkpoint.every_steps:
            self.checkpoints = Checkpoints(spec.checkpoint, self.line.on_line, self._record_checkpoint)

    async def _record_checkpoint(self, version: PolicyVersion) -> None:
        record = dcs_pb2.LogRecord(checkpoint=dcs_pb2.CheckpointRecord(version=version.to_proto()))
        await self._durable(self._append(record))

    def kept_checkpoints(self) -> Checkpoints:
        if self.checkpoints is None:
            raise Precondition("the run's recipe keeps no checkpoints (checkpoint.every_steps = 0)")
        return self.checkpoints

    def _opened(self) -> dcs_pb2.OpenRunRequest:
        if self.spec is None:
            raise NotFound("the run has not been opened at dcs")
        return self.spec

    def _append(self, record: dcs_pb2.LogRecord) -> int:
        record.revision = self.line.revision + 1
        record.time.FromNanoseconds(time.time_ns())
        self._log.append(_RECORD + record.SerializeToString())
        self.line.apply(record)
        self.records.append(record)
        return record.revision

    async def _durable(self, revision: int) -> None:
        await self._log.sync()
        if revision > self._durable_revision:
            self._durable_revision = revision
            async with self._changed:
                self._changed.notify_all()

    async def fence(self, holder: str, term: int) -> int:
        """Refuse an old term; make a newer one durable before anything is done under it."""
        self._opened()
        if self.line.check_term(holder, term):
            self.line.apply_term(holder, term)
            self._log.append(_TERM + dcs_pb2.RegisterTermRequest(holder=holder, term=term).SerializeToString())
            # A newer incarnation of a trainable role ends what the old one had begun.
            if holder in self._opened().snapshot_ranks:
                self.store.drop_pending()
            await self._log.sync()
        return self.line.terms[holder]

    async def begin(self, model: str, version: PolicyVersion, term: int) -> int:
        await self.fence(model, term)
        self.line.check_begin(version)
        self.store.drop_pending()
        self._attempts += 1
        attempt = self._boots << _ATTEMPTS_PER_BOOT_BITS | self._attempts
        self.store.pending = HeldVersion(attempt)
        self._drop_snapshots(keep_attempt=attempt)
        return attempt

    def push_target(self, header: dcs_pb2.PushHeader) -> HeldVersion:
        """Where the slices of a push belong; refuses before any byte is received."""
        version = PolicyVersion.from_proto(header.version)
        self.line.check_term(POLICY, header.term)
        for entry in header.slices:
            check_slice(entry)
        target = self._held_for(version, header.attempt)
        known = sum(entry.size_bytes for entry in header.slices if (entry.name, tuple(entry.start)) in target.slices)
        self.store.reserve(sum(e.size_bytes for e in header.slices) - known, f"push of version {version}")
        return target

    def _held_for(self, version: PolicyVersion, attempt: int) -> HeldVersion:
        pending = self.store.pending
        if pending is not None and pending.attempt == attempt and version.number == self.line.next_number:
            return pending
        if version == self.line.head and self.line.commits[-1].attempt == attempt:
            return self.store.versions.setdefault((version.lineage, version.number), HeldVersion(attempt))
        raise AttemptGone(f"attempt {attempt} of version {version} is gone; begin again")

    def store_slices(self, header: dcs_pb2.PushHeader, parts: Sequence[Part]) -> int:
        """Keep verified bytes; completes the head where it was pushed again after a loss."""
        version = PolicyVersion.from_proto(header.version)
        target = self._held_for(version, header.attempt)
        for entry, part in zip(header.slices, parts, strict=True):
            self.store.add_slice(target, entry, part)
        if target is not self.store.pending and not target.complete:
            self._complete_head_again(version, target)
        return len(header.slices)

    def _complete_head_again(self, version: PolicyVersion, target: HeldVersion) -> None:
        try:
            check_complete(target.entries(), self._schema)
        except Precondition:
            return  # other ranks have yet to push theirs
        if manifest_hash(target.entries()) != self.line.commits[-1].manifest_hash:
            self.store.drop_version((version.lineage, version.number))
            raise ManifestMismatch(f"version {version} pushed again differs from what was committed")
        target.complete = True

    async def commit(self, record: dcs_pb2.CommitRecord) -> tuple[int, dcs_pb2.CommitRecord]:
        """The commit point. A repeat gets the stored answer, whatever its term."""
        stored = self.line.stored_commit(record)
        if stored is None:
            failpoint("dcs.commit_before_append")
            stored = self._commit_now(record)
            failpoint("dcs.commit_before_fsync")
        await self._durable(max(stored, self.line.revision))
        failpoint("dcs.commit_after_fsync")
        return stored, self.line.commits[record.version.number]

    def _commit_now(self, record: dcs_pb2.CommitRecord) -> int:
        version = PolicyVersion.from_proto(record.version)
        if self.line.check_term(POLICY, record.term):
            raise Precondition(f"term {record.term} of the actor was never registered")
        self.line.check_begin(version)
        pending = self.store.pending
        if pending is None or pending.attempt != record.attempt:
            raise AttemptGone(f"attempt {record.attempt} of version {version} is gone; begin again")
        check_complete(pending.entries(), self._schema)
        self._check_snapshot_gate(version, record.attempt)
        self._learn_schema(pending)
        pending.complete = True
        final = dcs_pb2.CommitRecord()
        final.CopyFrom(record)
        final.manifest_hash = manifest_hash(pending.entries())
        revision = self._append(dcs_pb2.LogRecord(commit=final))
        self.store.versions[version.lineage, version.number] = pending
        self.store.pending = None
        self._after_head_moved()
        self._move_recovery_point()
        return revision

    def _learn_schema(self, first: HeldVersion) -> None:
        """Into the log: after a restart it tells when a head that several ranks push again is whole."""
        if self._schema is None:
            self._log.append(_SCHEMA + dcs_pb2.GetManifestResponse(slices=first.entries()).SerializeToString())
            self._schema = schema_of(first.entries())

    def _check_snapshot_gate(self, version: PolicyVersion, attempt: int) -> None:
        newest = self.recovery()[0].number
        if self._snapshot_complete(version, attempt):
            newest = version.number
        allowed = self._opened().snapshot_every
        if version.number - newest > allowed:
            raise SnapshotMissing(
                f"version {version} waits for a recovery snapshot: the newest is {newest}, snapshot_every = {allowed}",
            )

    def _after_head_moved(self) -> None:
        """Keep the head and the version before it."""
        number = self.line.next_number - 1
        for key in list(self.store.versions):
            if key[1] < number - 1 or not self.line.on_line(PolicyVersion(*key)):
                self.store.drop_version(key)

    def abort(self, attempt: int) -> None:
        if self.store.pending is not None and self.store.pending.attempt == attempt:
            self.store.drop_pending()

    async def confirm(self, record: dcs_pb2.ConfirmedRecord) -> int:
        version = PolicyVersion.from_proto(record.version)
        known = self.line.confirmed.get(record.server)
        if known is not None and known[1] == record:
            await self._durable(known[0])
            return known[0]
        await self.fence(record.server, record.term)
        if not self.line.on_line(version):
            raise Precondition(f"version {version} is not on the line; the head is {self.line.head}")
        revision = self._append(dcs_pb2.LogRecord(confirmed=record))
        await self._durable(revision)
        return revision

    async def put_snapshot(self, header: dcs_pb2.SnapshotHeader, memory: SealedMemory) -> None:
        """Keep verified bytes."""
        self.check_snapshot(header)
        self.store.add_snapshot(header, memory)
        self._move_recovery_point()
        await self._durable(self.line.revision)

    def check_snapshot(self, header: dcs_pb2.SnapshotHeader) -> None:
        """A snapshot belongs to the attempt in progress or to the head; refuses before any byte is received."""
        self.line.check_term(header.role, header.term)
        ranks = self._opened().snapshot_ranks
        if header.rank >= ranks.get(header.role, 0):
            raise InvalidInput(f"{header.role} rank {header.rank} puts no snapshots in this run")
        version = PolicyVersion.from_proto(header.version)
        pending = self.store.pending
        begun = pending is not None and pending.attempt == header.attempt
        committed = self.line.on_line(version) and self.line.commit_of(version).attempt == header.attempt
        if not (begun or committed):
            raise AttemptGone(f"attempt {header.attempt} of version {version} is gone")
        if snapshot_key(header) not in self.store.snapshots:
            self.store.reserve(header.size_bytes, f"snapshot of {header.role} rank {header.rank}")

    def _snapshot_complete(self, version: PolicyVersion, attempt: int) -> bool:
        return all(
            (version.lineage, version.number, attempt, role, rank) in self.store.snapshots
            for role, ranks in self._opened().snapshot_ranks.items()
            for rank in range(ranks)
        )

    def recovery(self) -> tuple[PolicyVersion, bool]:
        """F as it can be loaded now, and whether that is from memory."""
        for commit in reversed(self.line.commits):
            version = PolicyVersion.from_proto(commit.version)
            if self._snapshot_complete(version, commit.attempt):
                return version, True
            if version in self.line.checkpoints and self.checkpoints is not None and self.checkpoints.usable(version):
                return version, False
        return PolicyVersion(0, 0), False

    def _move_recovery_point(self) -> None:
        """Append SNAPSHOT where F moved; older snapshots go."""
        version, in_memory = self.recovery()
        if not in_memory:
            return
        last = next((r for r in reversed(self.records) if r.WhichOneof("record") in ("snapshot", "rollback")), None)
        known = last is not None and last.HasField("snapshot") and last.snapshot.version == version.to_proto()
        if not known:
            self._append(dcs_pb2.LogRecord(snapshot=dcs_pb2.SnapshotRecord(version=version.to_proto())))
        if self.checkpoints is not None and self.checkpoints.due(version):
            self._start_save(self.checkpoints, version)
        pending = self.store.pending
        self._drop_snapshots(keep_attempt=pending.attempt if pending else 0)

    def _start_save(self, checkpoints: Checkpoints, version: PolicyVersion) -> None:
        """From what is in memory now; its bytes count against the budget until they are on disk."""
        held = self.store.versions.get((version.lineage, version.number))
        if held is None or not held.complete:
            checkpoints.owe()
            return
        commit = self.line.commit_of(version)
        states = {
            (role, rank): self.store.snapshots[version.lineage, version.number, commit.attempt, role, rank][1].view
            for role, ranks in self._opened().snapshot_ranks.items()
            for rank in range(ranks)
        }
        slices = [(entry, part.data) for entry, part in zip(held.entries(), held.parts(), strict=True)]
        content = Content(self._opened().run, commit, self.line.commit_revisions[version.number], slices, states)
        checkpoints.start(content, self.store.hold(content.size_bytes))

    async def save_checkpoint(self) -> PolicyVersion:
        """Save F unless that is done. Raises Precondition without F in memory, Exhausted where the disk refuses."""
        checkpoints = self.kept_checkpoints()
        await checkpoints.finish()
        version, in_memory = self.recovery()
        if not checkpoints.usable(version):
            if not in_memory:
                raise SnapshotMissing("there is no recovery snapshot to save yet")
            self._start_save(checkpoints, version)
            await checkpoints.finish()
            if not checkpoints.usable(version):
                raise Exhausted(checkpoints.last_error or f"version {version} is not in memory any more")
        return version

    def recovery_state(
        self, version: PolicyVersion, role: str, rank: int
    ) -> tuple[dcs_pb2.SnapshotHeader, bytes | memoryview]:
        """From memory, else from the checkpoint. Raises NotFound, or DataLoss for a damaged file."""
        attempt = self.line.commit_of(version).attempt
        found = self.store.snapshots.get((version.lineage, version.number, attempt, role, rank))
        if found is not None:
            return found[0], found[1].view
        if self.checkpoints is None:
            raise NotFound(f"no snapshot of {role} rank {rank} for version {version}")
        state, digest = self.checkpoints.read_state(version, role, rank)
        header = dcs_pb2.SnapshotHeader(
            run=self._opened().run,
            version=version.to_proto(),
            attempt=attempt,
            role=role,
            rank=rank,
            size_bytes=len(state),
            hash=digest,
        )
        return header, state

    def _drop_snapshots(self, keep_attempt: int) -> None:
        version, in_memory = self.recovery()
        recovery_attempt = self.line.commit_of(version).attempt if in_memory else -1

        def kept(key: SnapshotKey) -> bool:
            on_line = self.line.on_line(PolicyVersion(key[0], key[1]))
            newer = on_line and key[1] > version.number and self.line.commits[key[1]].attempt == key[2]
            return key[2] in (keep_attempt, recovery_attempt) or newer

        for key in list(self.store.snapshots):
            if not kept(key):
                self.store.drop_snapshot(key)

    async def rollback(self, lost_head: PolicyVersion, reason: str) -> tuple[int, dcs_pb2.RollbackRecord]:
        """End the lineage at F. A repeat gets the stored answer."""
        known = self.line.rollback
        if known is not None and known[1] == lost_head:
            await self._durable(known[0])
            return known[0], known[2]
        if lost_head != self.line.head:
            raise Precondition(f"head {lost_head} is not the head any more; it is {self.line.head}")
        target = self.recovery()[0]
        record = dcs_pb2.RollbackRecord(lineage=self.line.lineage + 1, head=target.number, reason=reason)
        self.store.drop_pending()
        revision = self._append(dcs_pb2.LogRecord(rollback=record))
        self._after_head_moved()
        self._drop_snapshots(keep_attempt=0)
        await self._durable(revision)
        return revision, record

    def held(self, version: PolicyVersion) -> HeldVersion:
        """Complete bytes of a committed version."""
        self.line.commit_of(version)
        held = self.store.versions.get((version.lineage, version.number))
        if held is None or not held.complete:
            raise BytesLost(f"dcs does not hold the bytes of version {version} (any more); follow the log")
        return held

    async def watch(self, after_revision: int) -> AsyncIterator[dcs_pb2.LogRecord]:
        """Durable records behind a revision, then each new one."""
        position = after_revision
        while True:
            while position < self._durable_revision:
                yield self.records[position]
                position += 1
            async with self._changed:
                while position >= self._durable_revision:
                    await self._changed.wait()

    def close(self) -> None:
        self._log.close()
