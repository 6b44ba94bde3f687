"""The queue daemon under test: started, killed and frozen again and again on one state directory."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ZYGOTE = Path(__file__).with_name("zygote.py")
POINTS = (
    "queue.before_fsync",
    "queue.between_fsyncs",
    "queue.after_fsync",
    "queue.after_append",
    "queue.after_put_logged",
    "queue.before_apply_commit",
    "queue.after_apply_commit",
    "queue.before_payload_write",
    "queue.payload_half_written",
    "queue.before_rotate",
    "queue.after_rotate",
    "queue.snapshot_before_fsync",
    "queue.snapshot_before_rename",
    "queue.snapshot_before_compaction",
    "queue.compaction_midway",
    "queue.mid_recovery",
)
START_SECONDS = 60.0
USUAL_START_SECONDS, SLOWER_MAX = 0.1, 6.0
"""A machine on which the daemon takes longer to start gets proportionally more time before it is killed again, up to so
many times: otherwise no client would get a word in."""
KILLED_SECONDS = 60.0


class Zygote:
    """Parent of all daemons of a campaign."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(ZYGOTE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lock = threading.Lock()
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def fork(self, order: dict) -> int:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return int(self._read())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Stop:
    """How one incarnation ends: at a named point and hit, or after so long; a frozen one goes on or dies."""

    action: str  # kill, stop
    point: str
    hit: int
    after_seconds: float
    frozen_seconds: float
    dies: bool

    @staticmethod
    def draw(rng: random.Random) -> Stop:
        named = rng.random() < 0.65
        point = rng.choice(POINTS) if named else ""
        rare = "rotate" in point or "snapshot" in point or "compaction" in point or "mid_recovery" in point
        stops = rng.random() < 0.15
        return Stop(
            action="stop" if stops else "kill",
            point=point,
            hit=1 if rare else 1 + int(rng.expovariate(1 / 8)),
            after_seconds=1.5 if named else rng.uniform(0.02, 1.2),
            frozen_seconds=rng.uniform(0.05, 1.6),
            dies=rng.random() < 0.5,
        )


class Broker:
    """One state directory, one address, many incarnations."""

    def __init__(self, zygote: Zygote, folder: Path, port: int) -> None:
        self._zygote = zygote
        self._folder = folder
        self.address = f"127.0.0.1:{port}"
        self.starts = 0
        self.start_seconds: list[float] = []
        self.pid = 0
        """Of the newest incarnation."""
        self._pidfd = -1
        """-1 once it is known to have ended."""

    def start(self, stop: Stop | None = None) -> None:
        """Returns once the daemon serves, or has died before it did."""
        self.starts += 1
        address_file, marks = self._folder / "address", self._folder / f"fired-{self.starts}"
        address_file.unlink(missing_ok=True)
        marks.mkdir()
        env = {"RELAX_FAILPOINTS_DIR": str(marks), "RELAX_FAILPOINTS": ""}
        if stop and stop.point:
            env["RELAX_FAILPOINTS"] = f"{stop.point}={stop.action}@{stop.hit}"
        sizes = ["--segment-bytes", "6000", "--payload-file-bytes", "20000"]
        argv = [*sizes, "--listen", self.address, "--state-dir", str(self._folder / "state"), "--address-file"]
        began = time.monotonic()
        log = str(self._folder / "queue.log")
        self._forget()
        order = {"argv": [*argv, str(address_file)], "env": env, "log": log, "before": self.pid}
        self.pid = self._zygote.fork(order)
        self._pidfd = os.pidfd_open(self.pid)
        while not address_file.exists():
            if self.wait(0.005) or self.frozen:
                return
            assert time.monotonic() - began < START_SECONDS, self.log_tail()
        self.start_seconds.append(time.monotonic() - began)

    @property
    def frozen(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except (FileNotFoundError, ProcessLookupError):
            return False

    def fired(self) -> bool:
        return any((self._folder / f"fired-{self.starts}").iterdir())

    def wait(self, seconds: float) -> bool:
        """Whether it has ended."""
        return self._pidfd < 0 or bool(select.select([self._pidfd], [], [], seconds)[0])

    def _forget(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._pidfd = -1

    def send(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        if not self.wait(0):
            self.send(signal.SIGKILL)
        assert self.wait(KILLED_SECONDS), "kill -9 had no effect"
        self._forget()

    def run_until(self, stop: Stop) -> str:
        """Let the started incarnation end as `stop` says; what really happened."""
        slower = self.start_seconds[-1] / USUAL_START_SECONDS if self.start_seconds else 1.0
        end = time.monotonic() + stop.after_seconds * min(max(slower, 1.0), SLOWER_MAX)
        while time.monotonic() < end and not self.wait(0.01) and not self.frozen:
            pass
        if self.wait(0):
            self._forget()
            return f"kill {stop.point}" if self.fired() else "died"
        if stop.action == "stop":
            frozen_at = stop.point if self.frozen else "random instant"
            if not self.frozen:
                self.send(signal.SIGSTOP)
            self.wait(stop.frozen_seconds)
            if stop.dies:
                self.kill()
                return f"stop+kill {frozen_at}"
            self.send(signal.SIGCONT)
            self.wait(0.3)
            self.kill()
            return f"stop+cont+kill {frozen_at}"
        self.kill()
        return "kill random instant"

    def log_tail(self) -> str:
        return (self._folder / "queue.log").read_text()[-3000:]
