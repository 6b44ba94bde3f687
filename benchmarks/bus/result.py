"""The cost of one repetition of a case."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Repetition:
    """Payload bytes put and got once each, CPU seconds of all processes, wall seconds of each put and get."""

    n_bytes: int
    cpu_seconds: float
    put_seconds: list[float]
    get_seconds: list[float]

    @property
    def cpu_seconds_per_gb(self) -> float:
        return self.cpu_seconds / (self.n_bytes / 1e9)

    @property
    def round_trips(self) -> list[float]:
        return [p + g for p, g in zip(self.put_seconds, self.get_seconds, strict=True)]
