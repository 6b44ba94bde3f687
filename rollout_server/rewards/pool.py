"""Scores samples in a few reused subprocesses: a hung or crashed one costs its own sample and is replaced."""

import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from rollout_server.rewards.outcome import RewardItem, RewardOutcome, RewardStatus
from rollout_server.rewards.process import RewardProcess, RewardWorkerError

STOP_TIMEOUT_SECONDS = 10.0


@dataclass
class _Batch:
    """Samples scored together; the future resolves when the last outcome is in."""

    items: list[RewardItem]
    future: Future[list[RewardOutcome]] = field(default_factory=Future)
    outcomes: dict[int, RewardOutcome] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def store(self, index: int, outcome: RewardOutcome) -> None:
        with self.lock:
            self.outcomes[index] = outcome
            complete = len(self.outcomes) == len(self.items)
        if complete:
            self.future.set_result([self.outcomes[each] for each in range(len(self.items))])


@dataclass(frozen=True)
class _Task:
    batch: _Batch
    indices: list[int]


class RewardPool:
    """`deadline_seconds` is per sample. Raises RewardWorkerError at once where the reward cannot be loaded."""

    def __init__(self, reward: str, workers: int, deadline_seconds: float) -> None:
        self._reward = reward
        self._deadline_seconds = deadline_seconds
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        started = [Future[None]() for _ in range(workers)]
        self._threads = [
            threading.Thread(target=self._work, args=(future,), name=f"reward-{index}", daemon=True)
            for index, future in enumerate(started)
        ]
        for thread in self._threads:
            thread.start()
        for future in started:
            future.result()

    def score(self, items: list[RewardItem]) -> Future[list[RewardOutcome]]:
        """One outcome an item, in order, whatever happens to any of them."""
        batch = _Batch(items)
        if items:
            self._tasks.put(_Task(batch, list(range(len(items)))))
        else:
            batch.future.set_result([])
        return batch.future

    def close(self) -> None:
        """Ends after the samples already handed in."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(STOP_TIMEOUT_SECONDS + self._deadline_seconds)

    def _work(self, started: Future[None]) -> None:
        # Each thread starts its own processes: a process is tied to the life of the thread that started it.
        try:
            process = RewardProcess(self._reward)
        except RewardWorkerError as error:
            started.set_exception(error)
            return
        started.set_result(None)
        while (task := self._tasks.get()) is not None:
            process = self._score(process, task)
        process.kill()

    def _score(self, process: RewardProcess, task: _Task) -> RewardProcess:
        """Score the task; what a dying process leaves over is spread over all workers, one sample each."""
        if not process.alive:
            try:
                process = RewardProcess(self._reward)
            except RewardWorkerError as error:
                self._fail(task, f"the reward worker cannot be replaced: {error}")
                return process
        outcomes = process.score([task.batch.items[index] for index in task.indices], self._deadline_seconds)
        left = list(task.indices)
        for outcome in outcomes:
            task.batch.store(left.pop(0), outcome)
        for index in left:
            self._tasks.put(_Task(task.batch, [index]))
        return process

    def _fail(self, task: _Task, reason: str) -> None:
        for index in task.indices:
            task.batch.store(index, RewardOutcome(RewardStatus.ERROR, reason=reason))
