"""CPU seconds of a process and everything it started, by component, over time."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from types import TracebackType

import psutil

INTERVAL_SECONDS = 1.0
JOIN_SECONDS = 10.0
COMPONENTS = {
    "trainer_server": "actor",
    "rollout_server/engines/sglang/child": "engine",
    "rollout_server": "rollout",
    "relax_queue": "queue",
    "dcs": "dcs",
    "relaxd": "relaxd",
}
OTHER = "other"


@dataclass(frozen=True)
class Reading:
    unix_seconds: float
    cpu_seconds: dict[str, float]
    """By component, since the meter began; processes that have ended keep what they had used."""


@dataclass
class CpuMeter:
    """Measures while the context lasts, as long as the process `root` runs."""

    root: int
    interval_seconds: float = INTERVAL_SECONDS
    readings: list[Reading] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._used: dict[psutil.Process, tuple[str, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cpu-meter", daemon=True)

    def __enter__(self) -> CpuMeter:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(JOIN_SECONDS)

    def between(self, start_unix_seconds: float, end_unix_seconds: float) -> dict[str, float]:
        """CPU seconds by component between two moments, at the readings next to them."""
        first, last = (
            min(self.readings, key=lambda r: abs(r.unix_seconds - at)) for at in (start_unix_seconds, end_unix_seconds)
        )
        return {name: used - first.cpu_seconds.get(name, 0.0) for name, used in sorted(last.cpu_seconds.items())}

    def _run(self) -> None:
        while not self._stop.wait(self.interval_seconds) and self.read():
            pass

    def read(self) -> bool:
        """Take one reading; False once the process is gone."""
        try:
            root = psutil.Process(self.root)
            processes = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return False
        # Parents come before their children.
        for process in processes:
            try:
                times, component = process.cpu_times(), self._component(process)
            except psutil.NoSuchProcess:
                continue
            self._used[process] = component, times.user + times.system
        sums: dict[str, float] = {}
        for component, used in self._used.values():
            sums[component] = sums.get(component, 0.0) + used
        self.readings.append(Reading(time.time(), sums))
        return True

    def _component(self, process: psutil.Process) -> str:
        """A process without a name of its own has its parent's."""
        words = process.cmdline()[:5]
        for part, name in COMPONENTS.items():
            if any(part in word for word in words):
                return name
        parent = process.parent()
        return self._used[parent][0] if parent in self._used else OTHER
