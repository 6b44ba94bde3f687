"""What is sent: the four shapes of a training batch, and one small sample. Needs nothing but numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    """One repetition has enough `transfers` for the clock of CPU time, which ticks every 10 ms.

    per_step: batches of one training step; a step is committed and freed as a whole.
    """

    name: str
    title: str
    samples: int
    fields: int
    dtype: str
    length: int
    ragged: bool
    transfers: int
    per_step: int
    held: int
    """Batches held at once where memory is measured"""


CASES = (
    Case("i", "1024 x 8 KB", 1024, 1, "float32", 2048, False, 40, 10, 32),
    Case("ii", "64 x 4 MB", 64, 1, "float32", 1 << 20, False, 4, 1, 2),
    Case("iii", "1024 x 10 fields x 2048 int64", 1024, 10, "int64", 2048, False, 6, 2, 2),
    Case("iv", "1024 x 10 fields x 64..4032 int64, ragged", 1024, 10, "int64", 2048, True, 6, 2, 2),
    Case("single", "1 sample x 10 fields x 2048 int64", 1, 10, "int64", 2048, False, 100, 10, 400),
)


def lengths_of(case: Case) -> np.ndarray:
    """Values of each sample in each field."""
    if not case.ragged:
        return np.full(case.samples, case.length)
    return np.random.default_rng(0).integers(64, 4033, case.samples)


def flat_values(case: Case) -> np.ndarray:
    """One field's values, sample after sample; every field has the same."""
    count = int(lengths_of(case).sum())
    random = np.random.default_rng(1)
    if case.dtype == "float32":
        return random.standard_normal(count, np.float32)
    return random.integers(0, 150_000, count, np.int64)


def payload_bytes(case: Case) -> int:
    return int(lengths_of(case).sum()) * np.dtype(case.dtype).itemsize * case.fields
