"""Starts daemons as subprocesses of this host, and finds them again after relaxd was restarted."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from relaxd.store import ProcessRow

_KILL_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class ProcessSpec:
    """How one process of a role is started. The launcher adds listen address, incarnation and controller."""

    instance: str
    rank: int
    module: str
    log_path: Path
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    keeps_port: bool = False
    """Peers hold its address: a restart listens on the port of before."""
    needs_store: bool = False
    """Its ranks meet at a torch.distributed store; each incarnation gets an address of its own."""
    host: int = 0
    """Of the run's hosts. This launcher starts processes of the first one only."""


class Process:
    """A running process, ours or adopted."""

    def __init__(self, row: ProcessRow, popen: subprocess.Popen[bytes] | None) -> None:
        self.row = row
        self._popen = popen
        self._exited = asyncio.Event()
        self.exit_code: int | None = None
        """None while it runs, and for an adopted process, whose code only its real parent can see."""
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
            self.exit_code = self._popen.wait()
        self._exited.set()

    @property
    def running(self) -> bool:
        return not self._exited.is_set()

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
    """Subprocesses in sessions of their own: they outlive relaxd, and a terminal's Ctrl-C does not reach them."""

    def __init__(self, controller: str, state_dir: Path) -> None:
        self._controller = controller
        self._state_dir = state_dir

    def start(self, spec: ProcessSpec, incarnation: str, port: int, store_port: int) -> Process:
        state_dir = self._state_dir / spec.instance
        argv = [
            sys.executable,
            "-m",
            spec.module,
            "--listen",
            f"127.0.0.1:{port}",
            "--state-dir",
            str(state_dir),
            "--controller",
            self._controller,
            "--instance",
            spec.instance,
            "--incarnation",
            incarnation,
            *spec.args,
            *(("--store", f"127.0.0.1:{store_port}") if spec.needs_store else ()),
        ]
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with spec.log_path.open("ab") as log:
            popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **spec.env},
            )
        return Process(ProcessRow(spec.instance, spec.rank, popen.pid, incarnation, port), popen)


def adopt(row: ProcessRow) -> Process | None:
    """The process of an earlier relaxd, if it still runs and is really that one."""
    try:
        command = Path(f"/proc/{row.pid}/cmdline").read_bytes().split(b"\0")
        state = Path(f"/proc/{row.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None
    if row.incarnation.encode() not in command or state == "Z":
        return None
    return Process(row, None)


def last_line(path: Path) -> str:
    """The last line a daemon wrote that is no JSON log record: its one-line error."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line.strip() and not line.startswith("{")), "")
