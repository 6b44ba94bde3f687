"""A managed engine is killed or breaks: its requests end, it starts again, and it serves only verified weights.

One engine dies twice here, and each death is looked at from all sides, because it takes half a minute to come back.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from engine_conformance import WAIT_SECONDS, Bench, wait_until

from rollout_server.engines.contract import (
    EngineError,
    EngineUnusable,
    FinishReason,
    GenerateRequest,
    PauseMode,
    Probe,
    SamplingParams,
    StagedWeights,
    Tolerance,
)
from rollout_server.engines.sglang.engine import SglangEngine

RESTART_SECONDS = 480.0


def pid_of(engine: SglangEngine) -> int:
    return int(engine.health().detail.rpartition("pid ")[2])


def members(group: int) -> set[int]:
    """Processes of a group that have not ended."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


@pytest.mark.timeout(1500)
def test_I6_an_engine_that_dies_gives_its_requests_back_and_serves_again_once_verified(
    managed_bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench, engine = managed_bench, managed_bench.engine
    assert isinstance(engine, SglangEngine)
    reasons: list[str] = []
    engine.when_lost(reasons.append)
    bench.swap(1.0)
    restarts, long = engine.health().restarts, bench.ask_long(tokens=450)
    # The next process dies in its second swap, between two buckets of weights.
    monkeypatch.setenv("RELAX_FAILPOINTS", "engine.mid_swap=kill@2")
    monkeypatch.setenv("RELAX_FAILPOINTS_DIR", str(tmp_path))
    first = pid_of(engine)
    assert len(members(first)) >= 3
    os.kill(first, signal.SIGKILL)

    assert {each.finish_reason for each in long.result(WAIT_SECONDS)} == {FinishReason.ABORT}
    wait_until(lambda: engine.health().restarts == restarts + 1)
    assert engine.health().version is None
    assert "its process ended with -9" in engine.health().detail
    assert "its process ended with -9" in reasons[0]
    wait_until(lambda: not members(first))

    waiting = bench.ask([7])
    engine.ready().result(RESTART_SECONDS)
    assert pid_of(engine) != first
    time.sleep(0.1)
    assert not waiting.done()
    version = bench.swap(1.0)
    for completion in waiting.result(WAIT_SECONDS):
        assert (completion.versions == version).all()
        bench.check([7], completion)

    second, long = pid_of(engine), bench.ask_long(tokens=450)
    with pytest.raises(EngineError, match="lost"):
        bench.swap(0.9, PauseMode.IN_PLACE)
    assert (tmp_path / "engine.mid_swap.fired").exists()
    broken = len(bench.scales) - 1
    for completion in long.result(WAIT_SECONDS):
        assert completion.finish_reason is FinishReason.ABORT
        assert broken not in completion.versions
    wait_until(lambda: engine.health().restarts == restarts + 2)
    assert engine.health().version is None
    monkeypatch.delenv("RELAX_FAILPOINTS")
    engine.ready().result(RESTART_SECONDS)
    assert pid_of(engine) not in (first, second)
    right = bench.swap(0.9)
    for completion in bench.ask([7]).result(WAIT_SECONDS):
        assert (completion.versions == right).all()
        bench.check([7], completion)
    assert len(reasons) == 2


def test_an_interpreter_without_sglang_is_named(start_engine: object, endless_qwen3: Path) -> None:
    missing = start_engine(endless_qwen3, python="/nowhere/python")  # type: ignore[operator]
    with pytest.raises(EngineUnusable, match=r"engine_python = /nowhere/python: No such file"):
        missing.ready().result(WAIT_SECONDS)


def test_an_engine_that_ends_while_it_starts_is_given_up_with_its_last_words(
    start_engine: object, endless_qwen3: Path
) -> None:
    engine = start_engine(endless_qwen3, python="/bin/false")  # type: ignore[operator]
    with pytest.raises(EngineError, match="ended with 1 while it started"):
        engine.ready().result(WAIT_SECONDS)
    assert not engine.health().alive


def test_an_engine_can_be_closed_while_it_starts(start_engine: object, endless_qwen3: Path) -> None:
    engine = start_engine(endless_qwen3)  # type: ignore[operator]
    ready, waiting = engine.ready(), engine.generate(GenerateRequest("waits", [3], 2, SamplingParams(1.0, 4)))
    time.sleep(1.0)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 20.0
    for future in (ready, waiting):
        with pytest.raises(EngineError, match="has stopped"):
            future.result(WAIT_SECONDS)


@pytest.mark.timeout(1500)
def test_I6_a_swap_that_is_given_up_half_way_leaves_nothing_served(managed_bench: Bench) -> None:
    """By cancelling the swap at its probe: the weights are new, nobody has checked them, and SGLang is running."""
    bench, engine = managed_bench, managed_bench.engine
    assert isinstance(engine, SglangEngine)
    bench.swap(1.0)
    restarts, long = engine.health().restarts, bench.ask_long(tokens=450)
    probe = Probe([[3, 4, 5]] * 5000, [np.zeros(2, np.float32)] * 5000, 1.0, Tolerance(1e-4, 1e-4))
    swap = engine.swap(StagedWeights(999, bench.tensors(0.9), probe), PauseMode.RETRACT)
    wait_until(lambda: engine.health().version is None)
    time.sleep(0.2)
    swap.cancel()
    assert {each.finish_reason for each in long.result(WAIT_SECONDS)} == {FinishReason.ABORT}
    wait_until(lambda: engine.health().restarts == restarts + 1)
    assert "the swap to version 999 was given up" in engine.health().detail
    version = bench.swap(1.0)
    assert all((each.versions == version).all() for each in bench.ask([7]).result(WAIT_SECONDS))


def test_the_process_ends_with_the_one_that_started_it(endless_qwen3: Path, engine_python: str, tmp_path: Path) -> None:
    """Killed without a chance to clean up, while the process still imports SGLang, which is the hardest moment."""
    import subprocess
    import sys

    program = f"""
import sys, time
from pathlib import Path
from rollout_server.engines.sglang.engine import SglangEngine
from rollout_server.engines.sglang.managed import ManagedBackend, ManagedSettings
folder = Path({str(endless_qwen3)!r})
settings = ManagedSettings(folder, "Qwen3ForCausalLM", "float32", 0, {engine_python!r}, Path({str(tmp_path / "log")!r}),
                           8, 4096, True, 60.0)
backend = ManagedBackend(settings)
engine = SglangEngine(folder, backend)
while backend._process is None:
    time.sleep(0.01)
print(backend._process.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        group = int(starter.stdout.readline())
        time.sleep(2.0)  # the parent-death signal is asked for once Python runs
        assert members(group)
        starter.kill()
    wait_until(lambda: not members(group), seconds=20.0)
