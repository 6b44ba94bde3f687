"""Scores samples in a few reused subprocesses: a hung or crashed one costs its own sample and is replaced."""

import queue
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from relax_common.rows import RewardStatus
from relax_common.rpc.portal import promise
from rollout_server.rewards.outcome import RewardItem, RewardOutcome
from rollout_server.rewards.process import RewardProcess, RewardWorkerError

STOP_TIMEOUT_SECONDS = 10.0
HELPERS_MAX = 8


@dataclass
class _Batch:
    """Samples scored together; the future resolves when the last outcome is in."""

    items: list[RewardItem]
    future: Future[list[RewardOutcome]] = field(default_factory=promise)
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
    """One sample to score."""

    batch: _Batch
    index: int

    @property
    def item(self) -> RewardItem:
        return self.batch.items[self.index]

    def end(self, outcome: RewardOutcome) -> None:
        self.batch.store(self.index, outcome)


class RewardPool:
    """`deadline_seconds` is per sample. Raises RewardWorkerError at once if the reward cannot be loaded.

    No sample waits for a slow one: the worker of the slow sample passes on its other samples, a helper worker replaces
    it, and it retires when the sample has ended. So a batch with a few hung samples takes about one deadline, not one
    each.
    """

    def __init__(self, reward: str, workers: int, deadline_seconds: float) -> None:
        self._reward = reward
        self._deadline_seconds = deadline_seconds
        self._workers = workers
        self._tasks: queue.SimpleQueue[list[_Task] | None] = queue.SimpleQueue()
        started = [Future[None]() for _ in range(workers)]
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._working = 0
        for future in started:
            self._start(future)
        for future in started:
            future.result()

    def score(self, items: list[RewardItem]) -> Future[list[RewardOutcome]]:
        """One outcome per item, in order, whatever happens to any of them."""
        batch = _Batch(items)
        if items:
            self._tasks.put([_Task(batch, index) for index in range(len(items))])
        else:
            batch.future.set_result([])
        return batch.future

    def close(self) -> None:
        """Ends after the samples already handed in."""
        threads = list(self._threads)
        for _ in threads:
            self._tasks.put(None)
        for thread in threads:
            thread.join(STOP_TIMEOUT_SECONDS + self._deadline_seconds)

    def _start(self, started: Future[None]) -> None:
        """Start one more worker, unless the allowed number of helpers runs already."""
        with self._lock:
            if self._working >= self._workers + HELPERS_MAX:
                return
            self._working += 1
            name = f"reward-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._work, args=(started,), name=name, daemon=True))
        self._threads[-1].start()

    def _may_retire(self) -> bool:
        with self._lock:
            if self._working <= self._workers:
                return False
            self._working -= 1
            return True

    def _work(self, started: Future[None]) -> None:
        # Each thread starts its own processes: a process is tied to the life of the thread that started it.
        try:
            process = RewardProcess(self._reward)
        except RewardWorkerError as error:
            self._may_retire()
            started.set_exception(error)
            return
        started.set_result(None)
        while (tasks := self._take()) is not None:
            process, was_slow = self._score(process, tasks)
            if was_slow and self._may_retire():
                break
        process.kill()

    def _take(self) -> list[_Task] | None:
        """This worker's share of the waiting samples: groups end in bursts, and one exchange carries many samples."""
        tasks = self._tasks.get()
        if tasks is None:
            return None
        for _ in range(self._tasks.qsize() // self._workers):
            try:
                more = self._tasks.get_nowait()
            except queue.Empty:  # another worker was faster
                break
            if more is None:
                self._tasks.put(None)
                break
            tasks += more
        return tasks

    def _score(self, process: RewardProcess, tasks: list[_Task]) -> tuple[RewardProcess, bool]:
        """Score them; samples left by a dying or slow process are spread over all workers, one sample each."""
        if not process.alive:
            try:
                process = RewardProcess(self._reward)
            except RewardWorkerError as error:
                for task in tasks:
                    task.end(RewardOutcome(RewardStatus.ERROR, reason=f"the reward worker cannot be replaced: {error}"))
                return process, False
        left, was_slow = deque(tasks), False

        def hand_on() -> None:
            nonlocal was_slow
            was_slow = True
            self._start(Future())
            while len(left) > 1:
                self._tasks.put([left.pop()])

        for outcome in process.score([task.item for task in tasks], self._deadline_seconds, hand_on):
            left.popleft().end(outcome)
        if was_slow:
            process.kill()  # it has more to score than is wanted of it
        for task in left:
            self._tasks.put([task])
        return process, was_slow
