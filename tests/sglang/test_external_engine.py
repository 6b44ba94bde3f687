"""An engine behind a URL: a real sglang.launch_server of a tiny Llama, reached through a fault injector."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from engine_conformance import (
    PROMPTS,
    WAIT_SECONDS,
    Bench,
    check_end_tokens,
    test_abort_gives_back_what_there_is,
    test_I2_tokens_keep_the_version_that_sampled_them_across_a_swap,
    test_I6_a_prefix_cache_never_answers_under_other_weights,
    test_I6_a_probe_that_disagrees_leaves_nothing_served,
    test_log_probs_equal_a_plain_forward_for_prompts_of_all_lengths,
    test_pause_stops_and_resume_goes_on,
    test_score_equals_a_plain_forward,
    wait_until,
)
from fault_injector import FaultInjector
from tiny_models import copy_that_ends

from rollout_server.engines.contract import EngineUnusable, FinishReason
from rollout_server.engines.sglang.engine import SglangEngine
from rollout_server.engines.sglang.external import ExternalBackend, ExternalSettings
from rollout_server.engines.sglang.http import HttpClient

__all__ = [
    "test_I2_tokens_keep_the_version_that_sampled_them_across_a_swap",
    "test_I6_a_prefix_cache_never_answers_under_other_weights",
    "test_I6_a_probe_that_disagrees_leaves_nothing_served",
    "test_abort_gives_back_what_there_is",
    "test_log_probs_equal_a_plain_forward_for_prompts_of_all_lengths",
    "test_pause_stops_and_resume_goes_on",
    "test_score_equals_a_plain_forward",
]

START_SECONDS = 480.0
SILENCE_SECONDS = 3.0
LAUNCH = Path(__file__).resolve().parents[2] / "rollout_server/engines/sglang/cpu/launch_server.py"
OPTIONS = (
    *("--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--disable-cuda-graph", "--max-total-tokens", "32768", "--log-level", "warning"),
    *("--disable-overlap-schedule", "--skip-tokenizer-init", "--skip-server-warmup"),
)


@pytest.fixture(scope="module")
def injector(
    endless_llama: Path, engine_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultInjector]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [engine_python, "-P", str(LAUNCH), "--model-path", str(endless_llama), "--port", str(port), *OPTIONS]
    log_path = tmp_path_factory.mktemp("server") / "log"
    with log_path.open("wb") as log:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
    made = FaultInjector(port)
    yield made
    made.close()
    os.killpg(server.pid, signal.SIGKILL)
    server.wait(20)


# The first of these waits for the server to start.
pytestmark = pytest.mark.timeout(900)
Connect = Callable[..., SglangEngine]


@pytest.fixture(scope="module")
def connect(
    injector: FaultInjector, endless_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Connect]:
    made: list[SglangEngine] = []

    def connect(
        url: str = injector.url, model_dir: Path = endless_llama, silence: float = SILENCE_SECONDS, **changes: object
    ) -> SglangEngine:
        given = {"architecture": "LlamaForCausalLM", "exact_versions": True, "generate_seconds": 120.0, **changes}
        weights_dir = tmp_path_factory.mktemp("weights") / "engine-weights"
        settings = ExternalSettings(url=url, weights_dir=weights_dir, silence_seconds=silence, **given)  # type: ignore[arg-type]
        made.append(SglangEngine(model_dir, ExternalBackend(settings)))
        return made[-1]

    yield connect
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def bench(connect: Connect, endless_llama: Path) -> Bench:
    """The server starts while the first adapter waits for it."""
    first = connect(silence=START_SECONDS)
    first.ready().result(START_SECONDS)
    first.close()
    return Bench.of(connect(), endless_llama)


def test_an_end_token_is_the_last_of_its_response(
    bench: Bench, connect: Connect, endless_llama: Path, tmp_path: Path
) -> None:
    end_ids = copy_that_ends(endless_llama, tmp_path)
    engine = connect(model_dir=tmp_path)
    check_end_tokens(Bench.of(engine, tmp_path), end_ids)
    engine.close()


def test_transient_failures_are_repeated_and_cost_nothing(bench: Bench, injector: FaultInjector) -> None:
    injector.fail("/generate", 502, 6)
    injector.fail("/update_weights_from_disk", 503, 1)
    injector.fail("/pause_generation", 500, 1)
    restarts = bench.engine.health().restarts
    version = bench.swap(0.9)
    injector.fail("/generate", 502, 3)
    for completion in bench.ask(PROMPTS[1], samples=4).result(WAIT_SECONDS):
        assert completion.finish_reason is FinishReason.LENGTH
        assert (completion.versions == version).all()
        bench.check(PROMPTS[1], completion)
    assert injector.failed["/generate"] >= 4
    assert injector.failed["/update_weights_from_disk"] == injector.failed["/pause_generation"] == 1
    assert bench.engine.health().restarts == restarts


def test_I6_a_server_that_fails_for_long_is_lost_and_serves_again_once_verified(
    bench: Bench, injector: FaultInjector
) -> None:
    bench.swap(1.0)
    restarts, long = bench.engine.health().restarts, bench.ask_long(tokens=450)
    injector.fail("", 503, 1_000_000)
    wait_until(lambda: bench.engine.health().restarts == restarts + 1, seconds=6 * SILENCE_SECONDS)
    assert bench.engine.health().version is None
    assert "HTTP 503: injected failure" in bench.engine.health().detail
    assert len(long.result(WAIT_SECONDS)) == 4
    injector.heal()
    version = bench.swap(1.0)
    for completion in bench.ask(PROMPTS[0]).result(WAIT_SECONDS):
        assert (completion.versions == version).all()


def test_I6_weights_that_somebody_else_loaded_are_noticed(
    bench: Bench, injector: FaultInjector, endless_llama: Path
) -> None:
    import asyncio

    bench.swap(1.0)
    restarts = bench.engine.health().restarts
    body = {"model_path": str(endless_llama), "load_format": "auto", "weight_version": "another-run"}
    asyncio.run(HttpClient(injector.url).call("POST", "/update_weights_from_disk", body, deadline_seconds=60.0))
    completions = bench.ask(PROMPTS[0]).result(WAIT_SECONDS)
    assert {each.finish_reason for each in completions} == {FinishReason.ABORT}
    assert not any(len(each.token_ids) for each in completions)
    wait_until(lambda: bench.engine.health().restarts == restarts + 1)
    assert "under weights 'another-run', which this server did not load" in bench.engine.health().detail
    version = bench.swap(1.0)
    assert all((each.versions == version).all() for each in bench.ask([7]).result(WAIT_SECONDS))


def test_an_engine_that_cannot_be_used_is_named_in_one_line(bench: Bench, connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    stranger = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=stranger.serve_forever, daemon=True).start()
    for engine, message in (
        (connect(nobody, silence=1.0), f"rollout.engine_urls {nobody} does not answer: .*refused|Connect call failed"),
        (connect(f"http://127.0.0.1:{stranger.server_address[1]}", silence=1.0), "is no SGLang server: .*HTTP 501"),
        (connect(architecture="Qwen3ForCausalLM"), r"runs \['LlamaForCausalLM'\], the recipe's model is a Qwen3"),
    ):
        with pytest.raises(EngineUnusable, match=message):
            engine.ready().result(WAIT_SECONDS)
    stranger.shutdown()
    stranger.server_close()
