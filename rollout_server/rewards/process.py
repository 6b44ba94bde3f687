"""A reward worker as its pool sees it: items in, outcomes out. If an item takes too long, the worker and everything it
started are killed.

The worker adopts orphans of its own descendants (it is a subreaper), so that the tree below it is complete even where
code has forked twice and left its session. The two pipes to it are its own: programs that a reward starts neither
inherit them nor read them as their standard input.
"""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil

from relax_common.rows import RewardStatus
from rollout_server.rewards.outcome import RewardItem, RewardOutcome
from rollout_server.rewards.wire import (
    ANSWER_BYTES_MAX,
    BrokenAnswer,
    ask,
    decode_outcome,
    decode_started,
    encode_questions,
)

READ_BYTES = 65536
# Answers come one by one, tens of microseconds apart: waking for each would cost more than the scoring.
GATHER_SECONDS = 0.0005
START_DEADLINE_SECONDS = 60.0
# If a sample takes longer than this, the samples after it go to other workers.
SLOW_SECONDS = 1.0


class RewardWorkerError(RuntimeError):
    """The worker cannot be started or died; the message says why."""


class WorkerTimeout(RewardWorkerError):
    """No answer within the deadline."""


class RewardProcess:
    """Not only a context manager, because a pool replaces its processes one by one."""

    def __init__(self, reward: str) -> None:
        questions_read, self._questions = os.pipe()
        self._answers, answers_write = os.pipe()
        os.set_blocking(self._questions, False)
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "rollout_server.rewards.worker"),
                    *(str(questions_read), str(answers_write), str(os.getpid()), reward),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(questions_read, answers_write),
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        except OSError as cause:
            os.close(self._questions)
            os.close(self._answers)
            raise RewardWorkerError(f"cannot start a process: {cause}") from cause
        finally:
            os.close(questions_read)
            os.close(answers_write)
        self._open = True
        self._buffer = b""
        try:
            error = decode_started(self._read_line(START_DEADLINE_SECONDS))
        except (RewardWorkerError, BrokenAnswer) as cause:
            self.kill()
            raise RewardWorkerError(str(cause)) from cause
        if error:
            self.kill()
            raise RewardWorkerError(error)

    def score(
        self, items: list[RewardItem], deadline_seconds: float, when_slow: Callable[[], None]
    ) -> Iterator[RewardOutcome]:
        """Outcomes in order. After a TIMEOUT or an ERROR of the worker itself (it died, or its pipe carried something
        else) the process is dead and the rest is not scored.

        `when_slow` is called while a sample takes longer than SLOW_SECONDS; its outcome is then the last one.
        """
        slow = False

        def note() -> None:
            nonlocal slow
            slow = True
            when_slow()

        questions = ask(items)
        try:
            self._send(encode_questions(questions), deadline_seconds)
            for position, question in enumerate(questions):
                if position and b"\n" not in self._buffer:
                    time.sleep(GATHER_SECONDS)
                yield decode_outcome(question.nonce, self._read_line(deadline_seconds, note))
                if slow:
                    return
        except WorkerTimeout:
            self.kill()
            yield RewardOutcome(RewardStatus.TIMEOUT, reason=f"no reward within {deadline_seconds} s")
        except RewardWorkerError as error:
            self.kill()
            yield RewardOutcome(RewardStatus.ERROR, reason=str(error))
        except BrokenAnswer as error:
            self.kill()
            yield RewardOutcome(RewardStatus.ERROR, reason=f"the reward worker is replaced: {error}")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End the worker and the whole tree below it."""
        if self.alive:
            end_tree(self._process.pid)
        self._process.wait()
        if self._open:
            self._open = False
            os.close(self._questions)
            os.close(self._answers)

    def _send(self, payload: bytes, deadline_seconds: float) -> None:
        """Write with a deadline: once the pipe is full, a worker that does not read would block a plain write without
        end."""
        end, sent = time.monotonic() + deadline_seconds, 0
        while sent < len(payload):
            _, writable, _ = select.select([], [self._questions], [], max(0.0, end - time.monotonic()))
            if not writable:
                raise WorkerTimeout("the reward worker does not read")
            try:
                sent += os.write(self._questions, payload[sent : sent + READ_BYTES])
            except BrokenPipeError as error:
                raise RewardWorkerError(self._obituary()) from error

    def _read_line(self, deadline_seconds: float, when_slow: Callable[[], None] | None = None) -> bytes:
        now = time.monotonic()
        end, slow_at = now + deadline_seconds, now + SLOW_SECONDS
        while b"\n" not in self._buffer:
            if len(self._buffer) > ANSWER_BYTES_MAX:
                raise BrokenAnswer(f"its answer has no end after {len(self._buffer)} bytes")
            wake_at = end if when_slow is None else min(end, slow_at)
            readable, _, _ = select.select([self._answers], [], [], max(0.0, wake_at - time.monotonic()))
            if not readable and when_slow is not None:
                when_slow()
                when_slow = None
                continue
            if not readable:
                raise WorkerTimeout("no answer")
            data = os.read(self._answers, READ_BYTES)
            if not data:
                raise RewardWorkerError(self._obituary())
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _obituary(self) -> str:
        """The pipe has closed: the worker is dead, or has closed it and is as good as dead."""
        if self.alive:
            end_tree(self._process.pid)
        return f"the reward worker died (exit status {self._process.wait()})"


def end_tree(pid: int) -> None:
    """SIGKILL for a process and all its descendants. Each is stopped before its children are listed, so that no child
    that is just being started is missed."""
    found: dict[int, psutil.Process] = {}
    waiting = [pid]
    while waiting:
        current = waiting.pop()
        try:
            process = psutil.Process(current)
            process.suspend()
            found[current] = process
            waiting += [child.pid for child in process.children() if child.pid not in found]
        except psutil.NoSuchProcess:
            continue
    for process in reversed(found.values()):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
