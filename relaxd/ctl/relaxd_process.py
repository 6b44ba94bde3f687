"""relaxd as a child of `relaxctl run`: restarted on the same port and state when it dies, until restarts do not
help."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from relax_common.process.config import EXIT_BAD_CONFIG
from relax_common.process.host import keepable_port, own_folder
from relax_common.rpc.serving import EXIT_STALE_TERM
from relaxd.ctl.views import ADDRESS_FILE
from relaxd.launch.local import last_line, pids_with_state_below
from relaxd.plan.code_names import CodeNames

RESTART_DELAYS = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds to wait before each restart; one entry per restart allowed without progress of the run, a minute in all."""
STOP_SECONDS = 90.0
LEFTOVER_SECONDS = 20.0


class RelaxdProcess:
    """Once relaxd has died too often without progress in between, all daemons are stopped and `failure` is set."""

    def __init__(self, run_dir: Path, names: CodeNames) -> None:
        self._run_dir = run_dir
        self._names = names
        self._state_dir = run_dir / "state"
        self._log_path = run_dir / "logs" / "relaxd.log"
        own_folder(self._log_path.parent)
        self.address = f"127.0.0.1:{keepable_port()}"
        self.failure = ""
        self._failures_in_a_row = 0
        self._stopping = threading.Event()
        self._popen = self._start()
        self._keeper = threading.Thread(target=self._keep, name="keep-relaxd", daemon=True)
        self._keeper.start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "relaxd", "--listen", self.address),
                    *("--state-dir", str(self._state_dir)),
                    *("--runs-dir", str(self._run_dir.parent)),
                    *("--address-file", str(self._run_dir / ADDRESS_FILE)),
                    *("--allow-programs", ",".join(self._names.programs.values())),
                    *("--allow-imports", ",".join(self._names.imports.values())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _steps_seen(self) -> int:
        """Grows whenever relaxd lives long enough to see another step end."""
        try:
            return (self._run_dir / "metrics.jsonl").stat().st_size
        except FileNotFoundError:
            return 0

    @property
    def last_words(self) -> str:
        return last_line(self._log_path)

    def replace(self) -> None:
        """relaxd lives but does not answer: kill it, so that it is restarted."""
        self._popen.kill()

    def _keep(self) -> None:
        steps_seen = self._steps_seen()
        while True:
            code = self._popen.wait()
            if self._stopping.is_set():
                return
            seen = self._steps_seen()
            if seen > steps_seen:
                steps_seen, self._failures_in_a_row = seen, 0
            died, words = self._failures_in_a_row, last_line(self._log_path)
            if code in (EXIT_BAD_CONFIG, EXIT_STALE_TERM):
                self.failure = f"relaxd ended (exit {code}): {words}"
                return
            if died >= len(RESTART_DELAYS):
                self.failure = f"relaxd ended {died + 1} times in a row without progress (exit {code}): {words}"
                return
            self._failures_in_a_row = died + 1
            if self._stopping.wait(RESTART_DELAYS[died]):
                return
            self._popen = self._start()

    def stop(self) -> None:
        """Stop relaxd, which stops the daemons it started; then stop daemons that it, or one that died, has left
        running."""
        self._stopping.set()
        self._keeper.join(STOP_SECONDS if self.failure else 0.0)
        self._popen.send_signal(signal.SIGTERM)
        try:
            self._popen.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        stop_leftovers(self._state_dir)
        # Later commands must not look for a controller that has ended.
        (self._run_dir / ADDRESS_FILE).unlink(missing_ok=True)


def stop_leftovers(state_dir: Path) -> int:
    """Send SIGTERM, then SIGKILL, to every process of this host whose state is below `state_dir`; returns their
    number."""
    held = []
    for pid in pids_with_state_below(state_dir):
        try:
            held.append(os.pidfd_open(pid))
        except ProcessLookupError:
            continue
    for signum, seconds in ((signal.SIGTERM, LEFTOVER_SECONDS), (signal.SIGKILL, 5.0)):
        for pidfd in held:
            _signal(pidfd, signum)
        end = time.monotonic() + seconds
        while any(_signal(pidfd, 0) for pidfd in held) and time.monotonic() < end:
            time.sleep(0.05)
    for pidfd in held:
        os.close(pidfd)
    return len(held)


def _signal(pidfd: int, signum: int) -> bool:
    """Whether the process was still there."""
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        return False
    return True
