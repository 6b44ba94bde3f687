"""A reward worker as its pool sees it: items in, outcomes out, killed when one takes too long."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from relax_common.rows import RewardStatus
from rollout_server.rewards.outcome import RewardItem, RewardOutcome
from rollout_server.rewards.wire import decode_outcome, decode_started, encode_items

READ_BYTES = 65536
# Answers come one by one, tens of microseconds apart: waking for each would cost more than the scoring.
GATHER_SECONDS = 0.0005
START_DEADLINE_SECONDS = 60.0
# Longer than this, and whoever waits behind a sample goes elsewhere.
SLOW_SECONDS = 1.0


class RewardWorkerError(RuntimeError):
    """The worker cannot be started or died; the message says why."""


class WorkerTimeout(RewardWorkerError):
    """No answer within the deadline."""


class RewardProcess:
    """A context manager is not enough: a pool replaces its processes one by one."""

    def __init__(self, reward: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rollout_server.rewards.worker", reward],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._buffer = b""
        try:
            error = decode_started(self._read_line(START_DEADLINE_SECONDS))
        except RewardWorkerError:
            self.kill()
            raise
        if error:
            self.kill()
            raise RewardWorkerError(error)

    def score(
        self, items: list[RewardItem], deadline_seconds: float, when_slow: Callable[[], None]
    ) -> Iterator[RewardOutcome]:
        """Outcomes in order. After a TIMEOUT or a crash (ERROR) the process is dead and the rest is not scored.

        `when_slow` is called while a sample takes longer than SLOW_SECONDS; its outcome is then the last one.
        """
        slow = False

        def note() -> None:
            nonlocal slow
            slow = True
            when_slow()

        try:
            self._send(encode_items(items), deadline_seconds)
            for position in range(len(items)):
                if position and b"\n" not in self._buffer:
                    time.sleep(GATHER_SECONDS)
                yield decode_outcome(self._read_line(deadline_seconds, note))
                if slow:
                    return
        except WorkerTimeout:
            self.kill()
            yield RewardOutcome(RewardStatus.TIMEOUT, reason=f"no reward within {deadline_seconds} s")
        except RewardWorkerError as error:
            self.kill()
            yield RewardOutcome(RewardStatus.ERROR, reason=str(error))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End the worker and whatever it started."""
        if self.alive:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _send(self, payload: bytes, deadline_seconds: float) -> None:
        """A worker that does not read would block a plain write for ever once the pipe is full."""
        if self._process.stdin is None:
            raise RewardWorkerError("the reward worker has no stdin")
        descriptor = self._process.stdin.fileno()
        os.set_blocking(descriptor, False)
        end, sent = time.monotonic() + deadline_seconds, 0
        while sent < len(payload):
            _, writable, _ = select.select([], [descriptor], [], max(0.0, end - time.monotonic()))
            if not writable:
                raise WorkerTimeout("the reward worker does not read")
            try:
                sent += os.write(descriptor, payload[sent : sent + READ_BYTES])
            except BrokenPipeError as error:
                raise RewardWorkerError(self._obituary()) from error

    def _read_line(self, deadline_seconds: float, when_slow: Callable[[], None] | None = None) -> bytes:
        if self._process.stdout is None:
            raise RewardWorkerError("the reward worker has no stdout")
        descriptor, now = self._process.stdout.fileno(), time.monotonic()
        end, slow_at = now + deadline_seconds, now + SLOW_SECONDS
        while b"\n" not in self._buffer:
            wake_at = end if when_slow is None else min(end, slow_at)
            readable, _, _ = select.select([descriptor], [], [], max(0.0, wake_at - time.monotonic()))
            if not readable and when_slow is not None:
                when_slow()
                when_slow = None
                continue
            if not readable:
                raise WorkerTimeout("no answer")
            data = os.read(descriptor, READ_BYTES)
            if not data:
                raise RewardWorkerError(self._obituary())
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _obituary(self) -> str:
        return f"the reward worker died (exit status {self._process.wait()})"
