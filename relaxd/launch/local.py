"""Starts daemons as subprocesses of this host, and finds them again after relaxd has restarted."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from relax_common.process.host import keepable_port, own_folder
from relax_common.process.telemetry import get_logger
from relaxd.launch.launcher import ProcessSpec
from relaxd.store import ProcessRow, Store, put_process

_KILL_GRACE_SECONDS = 5.0


class LocalProcess:
    """A running process: our own child, or the child of an earlier relaxd. Implements launcher.Process."""

    def __init__(self, row: ProcessRow, popen: subprocess.Popen[bytes] | None) -> None:
        self.row = row
        self._popen = popen
        self._exited = asyncio.Event()
        self._exit_code: int | None = None
        try:
            self._pidfd = os.pidfd_open(row.pid)
        except ProcessLookupError:
            self._pidfd = -1
            self._note_exit()
            return
        asyncio.get_running_loop().add_reader(self._pidfd, self._note_exit)

    def _note_exit(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._popen is not None:
            self._exit_code = self._popen.wait()
        self._exited.set()

    @property
    def rank(self) -> int:
        return self.row.rank

    @property
    def pid(self) -> int:
        return self.row.pid

    @property
    def incarnation(self) -> str:
        return self.row.incarnation

    @property
    def running(self) -> bool:
        return not self._exited.is_set()

    @property
    def exit_code(self) -> int | None:
        return self._exit_code

    async def wait(self) -> None:
        await self._exited.wait()

    def signal(self, signum: int) -> None:
        if self._pidfd >= 0:
            signal.pidfd_send_signal(self._pidfd, signum)

    async def stop(self, grace_seconds: float) -> None:
        """SIGTERM, then SIGKILL after the grace."""
        if not self.running:
            return
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), grace_seconds)
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await asyncio.wait_for(self.wait(), _KILL_GRACE_SECONDS)


class LocalLauncher:
    """Starts subprocesses, each in its own session: they outlive relaxd, and a terminal's Ctrl-C does not reach
    them."""

    owns_processes = True

    def __init__(self, controller: str, state_dir: Path, store: Store) -> None:
        self._controller = controller
        self._state_dir = state_dir
        self._store = store
        self._earlier = {(row.instance, row.rank): row for row in store.processes}
        self._ports = {(row.instance, row.rank): row.port for row in store.processes}
        self._looked_for: set[str] = set()

    async def launch(self, specs: Sequence[ProcessSpec]) -> Sequence[LocalProcess]:
        instance = specs[0].instance
        if instance not in self._looked_for:
            self._looked_for.add(instance)
            found = await self._find(specs)
            if found:
                return found
        incarnation, store_port = uuid.uuid4().hex, keepable_port()
        started = [self._start(spec, incarnation, store_port) for spec in specs]
        for process in started:
            get_logger().info("daemon_started", instance=instance, rank=process.rank, pid=process.pid)
        self._store.write_later("the processes it started", *(put_process(p.row) for p in started))
        return started

    async def _find(self, specs: Sequence[ProcessSpec]) -> list[LocalProcess]:
        """Adopt all ranks that an earlier relaxd started, or none: an incomplete incarnation and strays are killed."""
        instance = specs[0].instance
        rows = [self._earlier.get((instance, spec.rank)) for spec in specs]
        found = [adopt(row) for row in rows if row is not None]
        alive = [process for process in found if process is not None]
        whole = len(alive) == len(specs)
        for process in () if whole else alive:
            await process.kill()
        kept = {process.pid for process in alive} if whole else set()
        # A relaxd that died between starting a process and recording it leaves a process that no row names.
        for pid in pids_with_state_below(self._state_dir / instance):
            if pid not in kept:
                await LocalProcess(ProcessRow(instance, 0, pid, "", 0), None).kill()
        return alive if whole else []

    def _start(self, spec: ProcessSpec, incarnation: str, store_port: int) -> LocalProcess:
        port = 0
        if spec.keeps_port:
            port = self._ports.setdefault((spec.instance, spec.rank), keepable_port())
        argv = [
            *(sys.executable, "-m", spec.module),
            *("--listen", f"127.0.0.1:{port}"),
            *("--state-dir", str(self._state_dir / spec.instance)),
            *("--controller", self._controller),
            *("--instance", spec.instance),
            *("--incarnation", incarnation),
            *spec.args,
            *(("--store", f"127.0.0.1:{store_port}") if spec.needs_store else ()),
        ]
        own_folder(spec.log_path.parent)
        with spec.log_path.open("ab") as log:
            popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **spec.env},
            )
        return LocalProcess(ProcessRow(spec.instance, spec.rank, popen.pid, incarnation, port), popen)


def adopt(row: ProcessRow) -> LocalProcess | None:
    """The process of an earlier relaxd, if it still runs and is really that one."""
    command = _command_of(row.pid)
    if command is None or row.incarnation.encode() not in command:
        return None
    return LocalProcess(row, None)


def pids_with_state_below(folder: Path) -> Iterator[int]:
    """Processes of this host whose `--state-dir` is `folder` or lies below it."""
    wanted = str(folder).encode()
    for path in Path("/proc").glob("[0-9]*"):
        command = _command_of(int(path.name)) or []
        if b"--state-dir" not in command[:-1]:
            continue
        given = command[command.index(b"--state-dir") + 1]
        if given == wanted or given.startswith(wanted + b"/"):
            yield int(path.name)


def _command_of(pid: int) -> list[bytes] | None:
    """Words of its command line; None if it has ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return None if state == "Z" else command


def last_line(path: Path) -> str:
    """The last line a daemon wrote that is not a JSON log record: its one-line error."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line.strip() and not line.startswith("{")), "")
