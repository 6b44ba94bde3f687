"""The embedded engine: the suite that every engine passes, and tests of its own features."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_conformance import (
    PROMPTS,
    WAIT_SECONDS,
    Bench,
    check_end_tokens,
    test_a_new_request_joins_while_another_runs,
    test_a_swap_while_paused_leaves_it_paused,
    test_abort_gives_back_what_there_is,
    test_bad_requests_are_refused_in_one_line,
    test_greedy_equals_transformers_generate,
    test_I2_tokens_keep_the_version_that_sampled_them_across_a_swap,
    test_I6_a_prefix_cache_never_answers_under_other_weights,
    test_I6_a_probe_that_disagrees_leaves_nothing_served,
    test_I6_tensors_of_another_model_are_refused_before_anything_changes,
    test_log_probs_equal_a_plain_forward_for_prompts_of_all_lengths,
    test_pause_by_abort_gives_back_what_there_is,
    test_pause_stops_and_resume_goes_on,
    test_sampled_frequencies_follow_the_distribution,
    test_score_equals_a_plain_forward,
)
from tiny_models import copy_that_ends, save_endless_llama, save_endless_qwen3

from rollout_server.engines.contract import EngineError, GenerateRequest, SamplingParams
from rollout_server.engines.torch.engine import TorchEngine

__all__ = [
    "test_I2_tokens_keep_the_version_that_sampled_them_across_a_swap",
    "test_I6_a_prefix_cache_never_answers_under_other_weights",
    "test_I6_a_probe_that_disagrees_leaves_nothing_served",
    "test_I6_tensors_of_another_model_are_refused_before_anything_changes",
    "test_a_new_request_joins_while_another_runs",
    "test_a_swap_while_paused_leaves_it_paused",
    "test_abort_gives_back_what_there_is",
    "test_bad_requests_are_refused_in_one_line",
    "test_greedy_equals_transformers_generate",
    "test_log_probs_equal_a_plain_forward_for_prompts_of_all_lengths",
    "test_pause_by_abort_gives_back_what_there_is",
    "test_pause_stops_and_resume_goes_on",
    "test_sampled_frequencies_follow_the_distribution",
    "test_score_equals_a_plain_forward",
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("endless")
    save_endless_qwen3(folder)
    engine = TorchEngine(folder, seed=0)
    yield Bench.of(engine, folder)
    engine.close()


def test_an_end_token_is_the_last_of_its_response(tmp_path: Path) -> None:
    save_endless_llama(tmp_path / "endless")
    end_ids = copy_that_ends(tmp_path / "endless", tmp_path / "ends")
    engine = TorchEngine(tmp_path / "ends", seed=0)
    check_end_tokens(Bench.of(engine, tmp_path / "ends"), end_ids)
    engine.close()


def test_score_takes_any_temperature(bench: Bench) -> None:
    scale = bench.scales[bench.swap(1.0)]
    prompt = [5, 14, 6, 15, 3, 33]
    (scored,) = bench.engine.score([prompt], 0.5).result(30)
    assert abs(bench.log_probs(prompt, scale, 0.5) - scored).max() <= 1e-5


def test_a_waiter_that_goes_away_harms_no_other(bench: Bench) -> None:
    """Its result was refused by the cancelled future, and the engine's thread ended with that error."""
    bench.swap(1.0)
    left = [bench.ask(prompt) for prompt in PROMPTS]
    for future in left:
        future.cancel()
    assert len(bench.ask([7], samples=1, tokens=4).result(WAIT_SECONDS)) == 1
    for future in left:
        assert len(future.result(WAIT_SECONDS)) == 4
    assert bench.engine.health().alive


@pytest.mark.parametrize("temperature", [-0.5, float("nan"), float("inf")])
def test_a_temperature_that_is_no_number_is_refused(bench: Bench, temperature: float) -> None:
    with pytest.raises(EngineError, match="it must be a number >= 0"):
        bench.ask([7], temperature=temperature)


def test_a_stopped_engine_fails_its_waiters(tmp_path: Path) -> None:
    save_endless_llama(tmp_path)
    engine = TorchEngine(tmp_path, seed=0)
    request = GenerateRequest("waits", [3], 4, SamplingParams(1.0, 20))
    waiting = engine.generate(request)
    engine.close()
    for future in (waiting, engine.generate(request)):
        with pytest.raises(EngineError, match="has stopped"):
            future.result(30)


def test_a_sample_is_drawn_from_its_seed_whatever_else_is_computed(bench: Bench) -> None:
    bench.swap(1.0)
    prompt, sampling = [5, 14, 6, 15], SamplingParams(1.0, 16)

    def drawn(seeds: list[int], others: int = 0) -> list[list[int]]:
        filler = [bench.engine.generate(GenerateRequest(f"f{i}", [3, 4], 3, sampling)) for i in range(others)]
        found = bench.engine.generate(GenerateRequest("seeded", prompt, len(seeds), sampling, seeds)).result(30)
        for future in filler:
            future.result(30)
        return [each.token_ids.tolist() for each in found]

    first = drawn([11, 12, 13])
    assert drawn([13, 11, 12], others=3) == [first[2], first[0], first[1]]
    assert len({tuple(each) for each in first}) == 3
    assert drawn([14]) != [first[0]]


def test_alone_a_request_gives_the_same_bits_whenever_it_comes(tmp_path: Path) -> None:
    save_endless_qwen3(tmp_path)
    engine = TorchEngine(tmp_path, seed=0, one_request_at_a_time=True)
    alone = Bench.of(engine, tmp_path)
    alone.swap(1.0)
    request = GenerateRequest("a", [5, 14, 6, 15], 4, SamplingParams(1.0, 12), (1, 2, 3, 4))
    before = engine.generate(request).result(30)
    others = [engine.generate(GenerateRequest(f"o{i}", [3] * (i + 1), 2, SamplingParams(1.0, 9))) for i in range(4)]
    after = engine.generate(request).result(30)
    for future in others:
        future.result(30)
    for one, other in zip(before, after, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.log_probs.tobytes() == other.log_probs.tobytes()
    engine.close()
