"""The SGLang tier: SGLang takes half a minute to start, so each of its processes serves many tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_conformance import Bench
from tiny_models import save_endless_llama, save_endless_qwen3

from rollout_server.engines.sglang.engine import SglangEngine, read_config
from rollout_server.engines.sglang.managed import ManagedBackend, ManagedSettings

REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLES_IN_FLIGHT_MAX = 64

StartEngine = Callable[..., SglangEngine]


@pytest.fixture(scope="session")
def engine_python() -> str:
    """The interpreter that has SGLang: RELAX_SGLANG_PYTHON, or what `make sglang` made."""
    given = os.environ.get("RELAX_SGLANG_PYTHON", str(REPOSITORY / ".venv-sglang/bin/python"))
    assert Path(given).exists(), f"{given} does not exist: run `make sglang`"
    return given


@pytest.fixture(scope="session")
def endless_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("endless")
    save_endless_qwen3(folder)
    return folder


@pytest.fixture(scope="session")
def endless_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_endless_llama(folder)
    return folder


@pytest.fixture(scope="session")
def start_engine(engine_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartEngine]:
    """start_engine(model_dir, **settings) -> a managed engine, starting."""
    started: list[SglangEngine] = []

    def start(model_dir: Path, **settings: Any) -> SglangEngine:
        given = {
            "model_dir": model_dir,
            "architecture": read_config(model_dir)["architectures"][0],
            "dtype": "float32",
            "seed": 5,
            "python": engine_python,
            "log_path": tmp_path_factory.mktemp("engine") / "engine.log",
            "samples_in_flight_max": SAMPLES_IN_FLIGHT_MAX,
            "kv_tokens": SAMPLES_IN_FLIGHT_MAX * 512,
            "exact_versions": True,
            "silence_seconds": 60.0,
        }
        engine = SglangEngine(model_dir, ManagedBackend(ManagedSettings(**{**given, **settings})))
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.close()


@pytest.fixture(scope="session")
def managed_bench(start_engine: StartEngine, endless_qwen3: Path) -> Bench:
    """The only managed engine of the tier. A test that kills it waits until it serves again."""
    return Bench.of(start_engine(endless_qwen3), endless_qwen3)
