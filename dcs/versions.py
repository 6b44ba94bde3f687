"""One run's versions: begun, pushed, committed, confirmed, rolled back. `dcs.rules` decides; this module acts.

Every operation asks the rules, appends to the log, and only then changes memory; it awaits nothing in between. An
answer waits for the fsync of everything that it depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dcs.codec import FULL
from dcs.metrics import ROLLBACKS, ROLLED_BACK_STEPS
from dcs.recovery import Recovery
from dcs.rules.attempts import Attempts, Gate, check_commit, check_model
from dcs.rules.line import POLICY
from dcs.rules.manifest import check_slice, manifest_hash, slice_key
from dcs.run_log import RunLog
from dcs.store import HeldVersion, MemoryStore, Part, snapshot_key
from relax.dcs.v1 import dcs_pb2
from relax_common.errors import BytesLost, ManifestMismatch, Precondition
from relax_common.failpoints import failpoint
from relax_common.process.telemetry import get_logger
from relax_common.storage.sealed_memory import SealedMemory
from relax_common.versions import PolicyVersion


class Versions:
    """The commit protocol of one run over its log, its bytes in memory and its recovery points."""

    def __init__(self, log: RunLog, recovery_folder: Path) -> None:
        self.log = log
        self.line = log.line
        self.spec = log.spec
        self.store = MemoryStore(log.spec.memory_budget_bytes)
        self._attempts = Attempts(boots=log.boots)
        self.recovery = Recovery(log, self.store, self._attempts, recovery_folder)

    async def fence(self, holder: str, term: int) -> int:
        """Refuse an old term; make a newer one durable before anything is done under it."""
        if self.line.terms.check(holder, term):
            self.log.append_term(holder, term)
            # A newer incarnation of the actor ends what the old one had begun.
            if holder == POLICY:
                self._end_attempt()
            await self.log.sync()
        return self.line.terms.of(holder)

    async def begin(self, model: str, version: PolicyVersion, term: int) -> int:
        check_model(model)
        await self.fence(model, term)
        await self.recovery.wait_for_disk()
        self.line.terms.check(model, term)
        attempt = self._attempts.begin(self.line, model, version)
        self.store.drop_pending()
        self.store.pending = HeldVersion(attempt)
        self.recovery.drop_superfluous()
        return attempt

    def _end_attempt(self) -> None:
        self._attempts.end()
        self.store.drop_pending()

    def abort(self, attempt: int, term: int) -> None:
        self.line.terms.check(POLICY, term)
        if self._attempts.current == attempt:
            self._end_attempt()

    def check_push(self, header: dcs_pb2.PushHeader) -> int:
        """Refuses before any byte is received. Returns how many bytes are not held yet."""
        self.line.terms.check(POLICY, header.term)
        for entry in header.slices:
            check_slice(entry)
        held = self._held_for(PolicyVersion.from_proto(header.version), header.attempt).slices
        return sum(entry.size_bytes for entry in header.slices if slice_key(entry) not in held)

    def _held_for(self, version: PolicyVersion, attempt: int) -> HeldVersion:
        if self._attempts.belongs_to(self.line, version, attempt) and self.store.pending is not None:
            return self.store.pending
        return self.store.versions.setdefault((version.lineage, version.number), HeldVersion(attempt))

    def store_slices(self, header: dcs_pb2.PushHeader, parts: Sequence[Part]) -> int:
        """Keep verified bytes; completes the head if it is being pushed again after a loss."""
        version = PolicyVersion.from_proto(header.version)
        target = self._held_for(version, header.attempt)
        for entry, part in zip(header.slices, parts, strict=True):
            self.store.add_slice(target, entry, part)
        if target is not self.store.pending and not target.complete:
            self._complete_head_again(version, target)
        return len(header.slices)

    def _complete_head_again(self, version: PolicyVersion, target: HeldVersion) -> None:
        try:
            FULL.check(target.entries(), self.log.schema)
        except Precondition:
            return  # other ranks have yet to push theirs
        if manifest_hash(target.entries()) != self.line.commit_of(version).manifest_hash:
            self.store.drop_version((version.lineage, version.number))
            raise ManifestMismatch(f"version {version} pushed again differs from what was committed")
        target.complete = True

    async def commit(self, record: dcs_pb2.CommitRecord) -> tuple[int, dcs_pb2.CommitRecord]:
        """The commit point. A repeat gets the stored answer, whatever its term."""
        stored = self.line.stored_commit(record)
        if stored is None:
            failpoint("dcs.commit_before_append")
            stored = self.line.stored_commit(record) or self._commit_now(record)
            failpoint("dcs.commit_before_fsync")
        await self.log.durable(max(stored, self.line.revision))
        failpoint("dcs.commit_after_fsync")
        return stored, self.log.record(stored).commit

    def _commit_now(self, record: dcs_pb2.CommitRecord) -> int:
        version = PolicyVersion.from_proto(record.version)
        pending = self.store.pending
        entries = pending.entries() if pending is not None else []
        states = self.recovery.states()
        own = version.number if states.complete(version, record.attempt) else 0
        gate = Gate(
            check_slices=lambda: FULL.check(entries, self.log.schema),
            newest_state=max(own, self.recovery.point().version.number),
            snapshot_every=self.spec.snapshot_every,
        )
        check_commit(self.line, self._attempts, record, gate)
        if pending is None:
            raise BytesLost(f"the bytes of version {version} are gone; begin again")
        if self.log.schema is None:
            self.log.append_schema(entries)
        final = dcs_pb2.CommitRecord()
        final.CopyFrom(record)
        final.manifest_hash = manifest_hash(entries)
        revision = self.log.append(dcs_pb2.LogRecord(commit=final))
        self._attempts.end()
        pending.complete = True
        self.store.versions[version.lineage, version.number] = pending
        self.store.pending = None
        self._after_head_moved()
        self.recovery.moved()
        return revision

    def _after_head_moved(self) -> None:
        """Drop all versions but the head and the one before it."""
        number = self.line.next_number - 1
        for key in list(self.store.versions):
            if key[1] < number - 1 or not self.line.on_line(PolicyVersion(*key)):
                self.store.drop_version(key)

    async def confirm(self, record: dcs_pb2.ConfirmedRecord) -> int:
        version = PolicyVersion.from_proto(record.version)
        known = self.line.confirmed.get(record.server)
        if known is not None and known[1] == record:
            await self.log.durable(known[0])
            return known[0]
        await self.fence(record.server, record.term)
        if not self.line.on_line(version):
            raise Precondition(f"version {version} is not on the line; the head is {self.line.head}")
        revision = self.log.append(dcs_pb2.LogRecord(confirmed=record))
        await self.log.durable(revision)
        return revision

    def held(self, version: PolicyVersion) -> HeldVersion:
        """Complete bytes of a committed version."""
        self.line.commit_of(version)
        held = self.store.versions.get((version.lineage, version.number))
        if held is None or not held.complete:
            raise BytesLost(f"dcs does not hold the bytes of version {version} (any more); follow the log")
        return held

    def check_snapshot(self, header: dcs_pb2.SnapshotHeader) -> int:
        """Refuses before any byte is received. Returns how many bytes are not held yet."""
        self._attempts.check_snapshot(self.line, header, dict(self.spec.snapshot_ranks))
        return 0 if snapshot_key(header) in self.store.snapshots else header.size_bytes

    async def put_snapshot(self, header: dcs_pb2.SnapshotHeader, memory: SealedMemory) -> None:
        """Keep verified bytes."""
        self.check_snapshot(header)
        self.store.add_snapshot(header, memory)
        self.recovery.moved()
        await self.log.durable(self.line.revision)

    async def rollback(self, lost_head: PolicyVersion, reason: str) -> tuple[int, dcs_pb2.RollbackRecord]:
        """End the lineage at F. A repeat gets the stored answer."""
        known = self.line.rollback
        if known is not None and known[1] == lost_head:
            await self.log.durable(known[0])
            return known[0], known[2]
        if lost_head != self.line.head:
            raise Precondition(f"head {lost_head} is not the head any more; it is {self.line.head}")
        target = self.recovery.point().version
        record = dcs_pb2.RollbackRecord(
            lineage=self.line.lineage + 1, head=target.number, reason=reason, lost_head=lost_head.to_proto()
        )
        revision = self.log.append(dcs_pb2.LogRecord(rollback=record))
        steps = lost_head.number - target.number
        ROLLBACKS.labels(self.spec.run).inc()
        ROLLED_BACK_STEPS.labels(self.spec.run).inc(steps)
        get_logger().error("rolled_back", run=self.spec.run, to=target.number, steps_lost=steps, reason=reason)
        self._end_attempt()
        self._after_head_moved()
        self.recovery.drop_superfluous()
        await self.log.durable(revision)
        return revision, record

    async def drop_bytes(self) -> None:
        """Called when the run has ended: its log and its checkpoints stay."""
        await self.recovery.finish()
        self._end_attempt()
        for key in list(self.store.versions):
            self.store.drop_version(key)
        for snapshot in list(self.store.snapshots):
            self.store.drop_snapshot(snapshot)
