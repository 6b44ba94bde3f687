"""One run at the broker: its state, its log, its payload and who waits for it."""

import asyncio
import errno
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from relax_common.errors import Exhausted, RelaxError, Unavailable
from relax_common.failpoints import failpoint
from relax_common.process.telemetry import get_logger
from relax_queue.broker.metrics import DISK_BYTES, OLDEST_LEASE, RECOVERY_SECONDS, publish
from relax_queue.broker.snapshotter import Snapshotter
from relax_queue.broker.timers import Timers
from relax_queue.broker.waits import Waits
from relax_queue.rows.columns import decode_block
from relax_queue.rules import events as ev
from relax_queue.rules.apply import fold, opened
from relax_queue.rules.group import Status
from relax_queue.rules.lifecycle import restart
from relax_queue.rules.planning import plan
from relax_queue.rules.state import Phase, RunState
from relax_queue.rules.transaction import Decision
from relax_queue.storage.blobs import Blobs
from relax_queue.storage.disk import RESERVE_BYTES, DiskSizes, check_room, disk_full, free_bytes
from relax_queue.storage.journal import Journal
from relax_queue.storage.payload import Payload
from relax_queue.storage.payload_files import PayloadFiles
from relax_queue.transport.intake import Intake

T = TypeVar("T")

PUBLISH_SECONDS = 0.25
FULL_DISK_RETRY_SECONDS = 1.0


def _nothing() -> None:
    pass


class RunBroker:
    """All changes go through `transact`: decide, apply, log, fsync, answer. Everything happens on one event loop."""

    def __init__(self, folder: Path, state: RunState, journal: Journal, files: PayloadFiles | None) -> None:
        self._folder = str(folder)  # needed in each transaction: a Path would be converted to text each time
        self.state = state
        self.journal = journal
        self.files = files
        self.payload = Payload()
        self.blobs = Blobs(folder / "blobs")
        self.waits = Waits(state.run)
        self.intake = Intake(lambda: self.state.bytes_held, state.spec.memory_budget_bytes)
        self._full_since: float | None = None
        """When the disk first had too little room for a transaction, in time.monotonic() seconds."""
        self._unfreed = False
        """Whether files may still hold payload that a transaction has freed."""
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.timers = Timers(state, self._start)
        self.snapshotter = Snapshotter(state, journal)
        self._tasks: set[asyncio.Task[None]] = set()
        self._publishing: asyncio.TimerHandle | None = None

    @classmethod
    async def create(cls, folder: Path, event: ev.RunOpened, sizes: DiskSizes) -> "RunBroker":
        """Open a new run; it is durable when this returns. Raises OSError if the write fails."""
        files = PayloadFiles(folder, sizes.payload_file_bytes) if event.spec.durability == "full" else None
        journal = Journal(folder, files.flush if files else _nothing, sizes)
        state, later = journal.recover()
        if state is not None or next(later, None) is not None:
            raise Unavailable(f"run {event.run} is being opened by another call")
        journal.append([event])
        await journal.sync()
        run = cls(folder, opened(event), journal, files)
        run.timers.note_closing()
        return run

    @classmethod
    async def recover(cls, folder: Path, sizes: DiskSizes) -> "RunBroker | None":
        """Recover a run from its snapshot and log on disk; None if its opening never became durable.

        With durability `full` its payload is recovered too, otherwise there is none.
        """
        began = time.perf_counter()
        files = PayloadFiles(folder, sizes.payload_file_bytes)
        journal = Journal(folder, files.flush, sizes)
        state, later = journal.recover()
        state = fold(later, state)
        if state is None:
            journal.close()
            return None
        full = state.spec.durability == "full"
        run = cls(folder, state, journal, files if full else None)
        kept = run._read_payload() if full else None
        run.blobs.sweep(state)
        failpoint("queue.mid_recovery")
        await run.transact(lambda decision: restart(decision, kept), reserve=True)
        for group in state.where(Status.LEASED):
            run.timers.extend((group.id, group.attempts))
        run.timers.note_closing()
        RECOVERY_SECONDS.labels(state.run).set(time.perf_counter() - began)
        get_logger().info(
            "run_recovered", run=state.run, head=state.head, revision=state.applied_revision, events=journal.revision,
            log_bytes=journal.log_bytes, snapshot_bytes=journal.snapshot_bytes, blocks=len(kept or ()),
            seconds=round(time.perf_counter() - began, 3),
        )  # fmt: skip
        return run

    def _read_payload(self) -> set[int]:
        """Load the blocks that the state names and whose bytes are intact."""
        assert self.files is not None
        kept = set()
        for block, content in self.files.recover(self.state.blocks):
            self.payload.add(block, len(content), decode_block(content, f"block {block}"))
            kept.add(block)
        return kept

    def keep(self, block: int, content: bytes | bytearray | memoryview) -> None:
        """Called in a command for each block that it stores: with durability `full` it is written to disk first."""
        if self.files is not None:
            self.files.write(block, content)

    async def transact(self, command: Callable[[Decision], T], *, reserve: bool = False, wanted_bytes: int = 0) -> T:
        """Run a command; its events and what can be planned after them are one durable transaction.

        On a full disk it is refused before it decides anything, or undone. `reserve`: transactions that must go on may
        use the last bytes of the disk. `wanted_bytes`: size of the payload that the command brings.
        """
        if not reserve:
            self._check_room(RESERVE_BYTES + (wanted_bytes if self.files else 0))
        decision = Decision(self.state)
        try:
            result = command(decision)
        except RelaxError:
            self._finish(decision)
            await self.sync()
            raise
        except OSError as error:
            raise self._undo(error) from error
        self._finish(decision)
        await self.sync()
        return result

    def _check_room(self, bytes_needed: int) -> None:
        try:
            check_room(self._folder, bytes_needed)
        except Exhausted:
            self._full_since = self._full_since or time.monotonic()
            raise

    def disk_wait(self) -> tuple[str, float] | None:
        """Why transactions are refused, and since when; None if the disk has room."""
        if self._full_since is None:
            return None
        try:
            check_room(self._folder, RESERVE_BYTES)
        except Exhausted as full:
            return full.message, self._full_since
        self._full_since = None
        return None

    def _finish(self, decision: Decision) -> None:
        if not decision.events:
            return
        plan(decision)
        try:
            self.journal.append(decision.events)
        except OSError as error:
            raise self._undo(error) from error
        self.payload.free(self.state)
        self._unfreed = True
        # Started here and not by the caller that gets the lease: it may go away while the grant becomes durable.
        for event in decision.events:
            if isinstance(event, ev.GroupLeased):
                self.timers.extend((event.group, event.attempt))
        self._publish_soon()
        self.timers.note_closing()
        self.snapshotter.begin_if_due()
        # In this order: woken readers prepare their answers while the transaction becomes durable.
        self.waits.changed()
        self.journal.flush_soon()

    def _free_on_disk(self) -> None:
        """Runs after the log is durable: files must not be removed before the record that frees them is written."""
        if not (self._unfreed and self.journal.is_durable):
            return
        self._unfreed = False
        try:
            if self.files is not None:
                self.files.free(self.state.blocks)
            self.blobs.sweep(self.state)
        except OSError as error:
            # The files take up room for longer; the next transaction tries again.
            self._unfreed = True
            get_logger().error("files_not_freed", run=self.state.run, error=str(error))

    def _undo(self, error: OSError) -> RelaxError:
        """Memory is ahead of the log: read the log back into the same state object."""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return self._break(error)
        base, later = self.journal.reread()
        state = fold(later, base)
        assert state is not None
        for f in fields(RunState):
            setattr(self.state, f.name, getattr(state, f.name))
        self.payload.free(self.state)
        self._unfreed = True
        self._free_on_disk()
        get_logger().error("disk_full", run=self.state.run, path=str(self.journal.folder))
        return disk_full(self.journal.folder, free_bytes(self.journal.folder), RESERVE_BYTES)

    def _start(self, command: Callable[[Decision], None]) -> None:
        """A transaction of the broker itself; on a full disk it is repeated until there is room."""

        async def work() -> None:
            while True:
                try:
                    return await self.transact(command, reserve=True)
                except Exhausted:
                    await asyncio.sleep(FULL_DISK_RETRY_SECONDS)

        task = asyncio.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _publish_soon(self) -> None:
        # Gauges are read every few seconds; setting all of them in each transaction would cost as much as a put.
        if self._publishing is None:
            self._publishing = asyncio.get_running_loop().call_later(PUBLISH_SECONDS, self._publish)

    def _publish(self) -> None:
        self._publishing = None
        self.timers.forget_ended()
        publish(self.state)
        run = self.state.run
        OLDEST_LEASE.labels(run).set(self.timers.oldest_lease_seconds)
        DISK_BYTES.labels(run, "log").set(self.journal.log_bytes)
        DISK_BYTES.labels(run, "snapshot").set(self.journal.snapshot_bytes)
        DISK_BYTES.labels(run, "payload").set(self.files.disk_bytes if self.files else 0)
        if self.timers.has_leases:
            self._publish_soon()  # a lease grows older without any change

    async def sync(self) -> None:
        """Wait until everything decided so far is durable; nothing is answered before."""
        try:
            advanced = await self.journal.sync()
        except OSError as error:
            raise self._break(error) from error
        self._free_on_disk()
        if advanced:
            self.waits.changed()

    def _break(self, error: OSError) -> RelaxError:
        # After a failed fsync nobody knows what is durable: only a restart from the log can give correct answers.
        message = f"the log of run {self.state.run} cannot be written: {error.strerror}; mend the disk and start again"
        if not self.broken.done():
            self.broken.set_result(message)
        return Unavailable(message)

    @property
    def ended(self) -> bool:
        return self.state.phase is Phase.ENDED

    def close(self) -> None:
        self.timers.close()
        if self._publishing is not None:
            self._publishing.cancel()
        for task in self._tasks:
            task.cancel()
        self.journal.close()
        if self.files is not None:
            self.files.close()
