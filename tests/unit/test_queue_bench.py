"""The bus's benchmark computes what its table says."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.bus import peer
from benchmarks.bus.cases import CASES, flat_values, lengths_of, payload_bytes
from benchmarks.bus.report import figures, ratios, table
from benchmarks.bus.result import Repetition

BY_NAME = {case.name: case for case in CASES}


def test_cases_have_the_sizes_that_they_name() -> None:
    sizes = {name: payload_bytes(case) for name, case in BY_NAME.items()}
    assert (sizes["i"], sizes["ii"], sizes["iii"]) == (1024 * 8192, 64 * 4 << 20, 1024 * 10 * 2048 * 8)
    ragged = BY_NAME["iv"]
    lengths = lengths_of(ragged)
    assert (lengths.min() >= 64, lengths.max() <= 4032, len(set(lengths.tolist())) > 100) == (True, True, True)
    assert len(flat_values(ragged)) == lengths.sum()
    assert flat_values(BY_NAME["i"]).dtype == np.float32


def test_figures_are_medians_over_repetitions_with_their_spread() -> None:
    case = BY_NAME["i"]
    ours = [Repetition(10**9, cpu, [0.1, 0.3], [0.1, 0.1]) for cpu in (1.0, 2.0, 4.0)]
    theirs = [Repetition(10**9, cpu, [1.0, 1.0], [1.0, 1.0]) for cpu in (10.0, 10.0, 12.0)]
    row = figures(case, "shm", ours, 1.05) | ratios(ours, theirs)
    assert row["cpu_seconds_per_gb"] == 2.0
    assert row["cpu_seconds_per_gb_range"] == [1.0, 4.0]
    assert row["round_trip_ms_p50"] == pytest.approx(300)
    assert row["round_trip_ms_p99"] == pytest.approx(400)
    assert row["gb_per_second"] == pytest.approx(0.5 / 0.3)
    assert (row["less_cpu"], row["less_cpu_range"]) == (5.0, [3.0, 10.0])
    text = io.StringIO()
    Console(file=text, width=200).print(table([row, figures(case, "transferqueue", theirs, None)]))
    assert "5.0 x (3.0 - 10.0)" in text.getvalue()
    assert ">= 8 x" in text.getvalue()


def test_a_peer_that_hangs_ends_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transferqueue_peer.py").write_text("import time\nprint('{}', flush=True)\ntime.sleep(60)\n")
    monkeypatch.setattr(peer, "HERE", tmp_path)
    hanging = peer.TransferQueue(Path(sys.executable))
    monkeypatch.setattr(peer, "ANSWER_SECONDS", 0.2)
    with pytest.raises(SystemExit, match="TransferQueue ended with -9"):
        hanging.repetition(BY_NAME["i"], 0)
