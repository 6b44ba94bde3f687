"""What a run can recover from: the recovery point F in memory and on disk, and what is done when F moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path

from dcs.checkpoints.recovery_copy import RecoveryCopies
from dcs.checkpoints.saver import Checkpoints
from dcs.checkpoints.writer import Content
from dcs.rules.attempts import Attempts
from dcs.rules.recovery import RecoveryPoint, Source, States, on_disk, recovery_point, superfluous_snapshots
from dcs.run_log import RunLog
from dcs.store import HeldVersion, MemoryStore, Part
from relax.dcs.v1 import dcs_pb2
from relax_common.errors import DataLoss, Exhausted, NotFound, Precondition, SnapshotMissing, WaitsForDisk
from relax_common.process.telemetry import get_logger
from relax_common.storage.sealed_memory import SealedMemory
from relax_common.versions import PolicyVersion

DISK_WAIT_SECONDS = 5.0
"""How long BeginVersion waits for the disk before it tells its caller why, who then repeats the call."""


class Recovery:
    """One run's recovery points over its log and its bytes in memory."""

    def __init__(self, log: RunLog, store: MemoryStore, attempts: Attempts, folder: Path) -> None:
        """`folder` is for the recovery copies of this run."""
        self._log = log
        self._line = log.line
        self._spec = log.spec
        self._store = store
        self._attempts = attempts
        self._background: set[asyncio.Task[None]] = set()
        self._wait = ""
        self.checkpoints: Checkpoints | None = None
        if self._spec.checkpoint.every_steps:
            self.checkpoints = Checkpoints(self._spec.checkpoint, self._line.on_line, self._record_checkpoint)
        self.copies = RecoveryCopies(folder, self._copy_ended) if self._spec.recovery_on_disk else None

    def states(self) -> States:
        copy = self.copies.newest if self.copies is not None else None
        checkpoints = self.checkpoints
        return States(
            ranks=self._spec.snapshot_ranks,
            snapshots=self._store.snapshots.keys(),
            copy=(copy.version, copy.attempt) if copy is not None else None,
            checkpoints=[v for v in self._line.checkpoints if checkpoints is not None and checkpoints.usable(v)],
        )

    def point(self) -> RecoveryPoint:
        """F as it can be loaded now."""
        return recovery_point(self._line, self.states())

    def on_disk(self) -> PolicyVersion:
        """The newest version that survives dcs and the actor ending together."""
        return on_disk(self._line, self.states())

    def moved(self) -> None:
        """Act on a new F: copy it to disk, save a checkpoint if one is due, drop older snapshots."""
        point = self.point()
        if point.in_memory:
            self._keep_on_disk(point.version)
            self._announce()
            if self.checkpoints is not None and self.checkpoints.due(point.version):
                self._start_save(self.checkpoints, point.version)
        self.drop_superfluous()

    def drop_superfluous(self) -> None:
        for key in superfluous_snapshots(self._line, self.states(), self._attempts.current):
            self._store.drop_snapshot(key)

    def _keep_on_disk(self, version: PolicyVersion) -> None:
        if self.copies is None or (self.copies.newest is not None and self.copies.newest.version == version):
            return

        def newest() -> tuple[Content, Callable[[], None]] | None:
            point = self.point()
            return self._content(point.version) if point.in_memory else None

        self.copies.start(newest)

    async def wait_for_disk(self) -> None:
        """Called before a version is begun. Waits while the recovery copy is so far behind that losing memory after
        this version would lose more than `snapshot_every` steps, and while a copy or checkpoint that is being written
        holds memory that the version needs.

        This is the only wait for these writes: a commit never waits for them. Raises WaitsForDisk if they take long.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + DISK_WAIT_SECONDS
        while (writing := self._writing()) and (why := self._needs(writing)):
            self._wait = f"dcs waits for the disk: {why}"
            left = end - loop.time()
            done, _ = await asyncio.wait(writing.values(), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise WaitsForDisk(self._wait)
        self._wait = ""

    def _needs(self, writing: Collection[str]) -> str:
        """Why the next version has to wait for a write in progress; empty: it has not."""
        number, on_disk = self._line.next_number, self.on_disk().number
        if "the recovery copy" in writing and number - on_disk > self._spec.snapshot_every:
            return (
                f"version {number} may be at most snapshot_every = {self._spec.snapshot_every} ahead of the recovery "
                f"copy, which holds version {on_disk} until the next one is written"
            )
        if self._store.free_bytes < self._version_bytes():
            return (
                f"the next version needs memory ({self._version_bytes()} bytes, {self._store.free_bytes} are free) "
                f"that is held until {' and '.join(writing)} is written"
            )
        return ""

    def _writing(self) -> dict[str, asyncio.Task[None]]:
        """The writes in progress, by name."""
        found = {
            "the recovery copy": self.copies.task if self.copies is not None else None,
            "a checkpoint": self.checkpoints.task if self.checkpoints is not None else None,
        }
        return {name: task for name, task in found.items() if task is not None}

    def _version_bytes(self) -> int:
        """A version takes about as much as the head and the newest state."""
        head = self._line.head
        held = self._store.versions.get((head.lineage, head.number)) if head is not None else None
        weights = sum(part.size_bytes for part in held.parts()) if held is not None else 0
        newest = max((key[:2] for key in self._store.snapshots), default=None)
        states = (memory.size_bytes for key, (_, memory) in self._store.snapshots.items() if key[:2] == newest)
        return weights + sum(states)

    @property
    def disk_wait(self) -> str:
        """What the next version waits for; empty: nothing."""
        return self._wait if self._writing() else ""

    def _announce(self) -> None:
        """Append SNAPSHOT: the queue then frees what a replay from an older state would need. So F is announced once it
        is on disk; or at once if it is not kept on disk or the write failed."""
        point = self.point()
        version = point.version
        if self.copies is not None and not self.copies.failed:
            version = self.on_disk()
        elif not point.in_memory:
            return
        known = self._line.announced
        if not version.number or (known is not None and known.number >= version.number):
            return
        try:
            self._log.append(dcs_pb2.LogRecord(snapshot=dcs_pb2.SnapshotRecord(version=version.to_proto())))
        except WaitsForDisk as error:
            get_logger().debug("recovery_point_not_announced", error=error.message)  # the next one will be

    def _copy_ended(self) -> None:
        self._announce()
        task = asyncio.create_task(self._make_durable())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _make_durable(self) -> None:
        try:
            await self._log.durable(self._line.revision)
        except WaitsForDisk as error:
            get_logger().error("log_not_durable", error=error.message)

    def _content(self, version: PolicyVersion) -> tuple[Content, Callable[[], None]] | None:
        """Returns references to all bytes of one version, counted against the budget until the returned function is
        called; None if its weights are not in memory."""
        held = self._store.versions.get((version.lineage, version.number))
        if held is None or not held.complete:
            return None
        commit = self._line.commit_of(version)
        found = {
            (role, rank): self._store.snapshots[version.lineage, version.number, commit.attempt, role, rank]
            for role, ranks in self._spec.snapshot_ranks.items()
            for rank in range(ranks)
        }
        content = Content(
            run=self._spec.run,
            commit=self._log.record(commit.revision).commit,
            dcs_revision=commit.revision,
            slices=[(entry, part.data) for entry, part in zip(held.entries(), held.parts(), strict=True)],
            states={key: memory.view for key, (_, memory) in found.items()},
            hashes={key: header.hash for key, (header, _) in found.items()},
        )
        memories = [*(part.memory for part in held.parts()), *(memory for _, memory in found.values())]
        return content, self._store.hold(memories)

    def _start_save(self, checkpoints: Checkpoints, version: PolicyVersion) -> None:
        made = self._content(version)
        if made is None:
            checkpoints.owe()
        else:
            checkpoints.start(*made)

    def kept_checkpoints(self) -> Checkpoints:
        if self.checkpoints is None:
            raise Precondition("the run's recipe keeps no checkpoints (checkpoint.every_steps = 0)")
        return self.checkpoints

    async def _record_checkpoint(self, version: PolicyVersion) -> None:
        record = dcs_pb2.LogRecord(checkpoint=dcs_pb2.CheckpointRecord(version=version.to_proto()))
        await self._log.durable(self._log.append(record))

    async def save_checkpoint(self) -> PolicyVersion:
        """Save F unless it is saved already. Raises SnapshotMissing if F is not in memory, Exhausted if the write
        fails."""
        checkpoints = self.kept_checkpoints()
        await checkpoints.finish()
        point = self.point()
        if not checkpoints.usable(point.version):
            if not point.in_memory:
                raise SnapshotMissing("there is no recovery snapshot to save yet")
            self._start_save(checkpoints, point.version)
            await checkpoints.finish()
            if not checkpoints.usable(point.version):
                raise Exhausted(checkpoints.last_error or f"version {point.version} is not in memory any more")
        return point.version

    def state(self, version: PolicyVersion, role: str, rank: int) -> tuple[dcs_pb2.SnapshotHeader, bytes | memoryview]:
        """Read it from memory, else from disk. Raises NotFound, or DataLoss for a damaged file."""
        attempt = self._line.commit_of(version).attempt
        found = self._store.snapshots.get((version.lineage, version.number, attempt, role, rank))
        if found is not None:
            return found[0], found[1].view
        state, digest = self._state_on_disk(version, role, rank)
        header = dcs_pb2.SnapshotHeader(
            run=self._spec.run,
            version=version.to_proto(),
            attempt=attempt,
            role=role,
            rank=rank,
            size_bytes=len(state),
            hash=digest,
        )
        return header, state

    def _state_on_disk(self, version: PolicyVersion, role: str, rank: int) -> tuple[bytes | memoryview, int]:
        copy = self.copies.newest if self.copies is not None else None
        if self.copies is not None and copy is not None and copy.version == version:
            try:
                memory, digest = copy.state(role, rank)
                return memory.view, digest
            except DataLoss as error:
                self.copies.give_up(error)
                raise
        if self.checkpoints is None:
            raise NotFound(f"no snapshot of {role} rank {rank} for version {version}")
        return self.checkpoints.read_state(version, role, rank)

    async def load_weights(self) -> None:
        """After a restart, load the head's weights from the recovery copy, so that engines need not wait for the
        actor."""
        copy, head = self.copies.newest if self.copies is not None else None, self._line.head
        if self.copies is None or copy is None or head != copy.version or self.point().source is not Source.COPY:
            return
        try:
            with self._store.receiving(sum(entry.size_bytes for entry in copy.header.slices), "the head's weights"):
                memory = await asyncio.to_thread(copy.weights)
        except DataLoss as error:
            self.copies.give_up(error)
        except Exhausted as error:
            get_logger().info("weights_not_loaded", error=error.message)  # the actor pushes them again
        else:
            self._take_loaded(head, copy.header, memory)

    def _take_loaded(self, version: PolicyVersion, header: dcs_pb2.RecoveryCopyHeader, memory: SealedMemory) -> None:
        key = (version.lineage, version.number)
        if self._line.head != version or key in self._store.versions:
            return  # the actor was faster
        held, offset = HeldVersion(header.commit.attempt), 0
        for entry in header.slices:
            self._store.add_slice(held, entry, Part(memory, offset, entry.size_bytes))
            offset += entry.size_bytes
        held.complete = True
        self._store.versions[key] = held
        get_logger().info("weights_loaded_from_disk", version=str(version), bytes=memory.size_bytes)

    async def finish_writing(self) -> None:
        """Wait for writes in progress."""
        if self.checkpoints is not None:
            await self.checkpoints.finish()
        while self.copies is not None and self.copies.task is not None:
            await self.copies.finish()

    async def finish(self) -> None:
        """Called when the run has ended: finish and keep the checkpoints, delete the recovery copy."""
        if self.checkpoints is not None:
            await self.checkpoints.finish()
        if self.copies is not None:
            await self.copies.delete()
