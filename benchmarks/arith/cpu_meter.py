"""CPU seconds of a process and everything it started, by component, over time; read from /proc."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

INTERVAL_SECONDS = 1.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
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
    """Runs beside the process `root` until it is left."""

    root: int
    readings: list[Reading] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._used: dict[tuple[int, str], tuple[str, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cpu-meter", daemon=True)

    def __enter__(self) -> CpuMeter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(10)

    def between(self, start_unix_seconds: float, end_unix_seconds: float) -> dict[str, float]:
        """CPU seconds by component between two moments, at the readings next to them."""
        first, last = (
            min(self.readings, key=lambda r: abs(r.unix_seconds - at)) for at in (start_unix_seconds, end_unix_seconds)
        )
        return {name: used - first.cpu_seconds.get(name, 0.0) for name, used in sorted(last.cpu_seconds.items())}

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            self._read()

    def _read(self) -> None:
        processes = _processes()
        for pid, component in _tree(self.root, processes).items():
            process = processes[pid]
            self._used[pid, process.started] = component, process.ticks / _TICKS_PER_SECOND
        sums: dict[str, float] = {}
        for component, used in self._used.values():
            sums[component] = sums.get(component, 0.0) + used
        self.readings.append(Reading(time.time(), sums))


@dataclass(frozen=True)
class Process:
    parent: int
    started: str
    ticks: int


def _processes() -> dict[int, Process]:
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            words = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # Behind the name: state, parent, ...; user and system ticks are words 11 and 12, the start is word 19.
        found[int(entry.name)] = Process(int(words[1]), words[19], int(words[11]) + int(words[12]))
    return found


def _tree(root: int, processes: dict[int, Process]) -> dict[int, str]:
    """The processes below `root` with their components; a process without a name of its own has its parent's."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    found: dict[int, str] = {}
    open_ones = [(root, OTHER)]
    while open_ones:
        pid, inherited = open_ones.pop()
        if pid in processes:
            found[pid] = _component(pid) or inherited
            open_ones += [(child, found[pid]) for child in children.get(pid, [])]
    return found


def _component(pid: int) -> str | None:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:5]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return next((name for part, name in COMPONENTS.items() if any(part in word for word in words)), None)
