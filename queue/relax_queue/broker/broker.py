"""All runs of this broker: opening, recovering, following, ending."""

import asyncio
import errno
from pathlib import Path

from relax_common.errors import Unavailable, UnknownRun
from relax_common.names import check_name
from relax_common.process.telemetry import get_logger
from relax_common.storage.framed_log import durable_folder
from relax_queue.broker.dcs_follower import follow
from relax_queue.broker.run_broker import RunBroker
from relax_queue.rows.spec import check_spec
from relax_queue.rules import events as ev
from relax_queue.rules.lifecycle import reopen
from relax_queue.storage.disk import RESERVE_BYTES, DiskSizes, check_room, disk_full, free_bytes


class Broker:
    """Runs by id. `serve` recovers them first; until then every call is UNAVAILABLE."""

    def __init__(self, state_dir: Path, sizes: DiskSizes) -> None:
        self._sizes = sizes
        self._folder = state_dir / "runs"
        self._runs: dict[str, RunBroker] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._opening = asyncio.Lock()
        self._failure: asyncio.Queue[str] = asyncio.Queue()
        self._recovered = False

    async def serve(self) -> str:
        """Recover, then work until something is broken beyond repair; returns the reason."""
        durable_folder(self._folder)
        for folder in sorted(p for p in self._folder.iterdir() if p.is_dir()):
            run = await RunBroker.recover(folder, self._sizes)
            if run is not None:
                self._adopt(run)
        self._recovered = True
        return await self._failure.get()

    def _adopt(self, run: RunBroker) -> None:
        self._runs[run.state.run] = run
        run.broken.add_done_callback(lambda broken: None if broken.cancelled() else self._fail(broken.result()))
        if not run.ended:
            task = asyncio.create_task(follow(run))
            self._followers[run.state.run] = task
            task.add_done_callback(self._follower_done)

    def _follower_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._fail(str(task.exception()))

    def _fail(self, reason: str) -> None:
        get_logger().error("broker_failed", reason=reason)
        self._failure.put_nowait(reason)

    def runs(self) -> list[RunBroker]:
        self._check_recovered()
        return list(self._runs.values())

    def run(self, run: str) -> RunBroker:
        self._check_recovered()
        found = self._runs.get(run)
        if found is None:
            known = ", ".join(self._runs) or "none"
            raise UnknownRun(f"run {run!r} is not open at this queue (open: {known})")
        return found

    def _check_recovered(self) -> None:
        if not self._recovered:
            raise Unavailable("the queue is still reading its logs")

    async def open(self, event: ev.RunOpened) -> RunBroker:
        """Open a run; a repeat is answered the same. Raises for a bad schema or one that does not fit the budget."""
        self._check_recovered()
        check_name(event.run, "run")
        check_spec(event.spec)
        async with self._opening:
            known = self._runs.get(event.run)
            if known is not None:
                await known.transact(lambda decision: reopen(decision, event))
                return known
            check_room(self._folder, RESERVE_BYTES)
            try:
                run = await RunBroker.create(self._folder / event.run, event, self._sizes)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise disk_full(self._folder, free_bytes(self._folder), RESERVE_BYTES) from error
                raise Unavailable(f"run {event.run} cannot be stored: {error.strerror}") from error
            self._adopt(run)
            return run

    def close(self) -> None:
        for task in self._followers.values():
            task.cancel()
        for run in self._runs.values():
            run.close()
