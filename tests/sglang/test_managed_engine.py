"""The managed engine against the suite that every engine passes, and tests of its own features."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from engine_conformance import (
    PROMPTS,
    WAIT_SECONDS,
    Bench,
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

from rollout_server.engines.contract import EngineError
from rollout_server.engines.sglang.jobs import Sample
from rollout_server.engines.sglang.sampling import SampleOutput

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


# The first of these waits for the engine to start.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def bench(managed_bench: Bench) -> Bench:
    return managed_bench


def test_the_prompt_of_a_group_is_prefilled_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.swap(1.0)
    cached: list[int] = []
    take = Sample.take

    def noting(self: Sample, output: SampleOutput, known_versions: Sequence[int]) -> None:
        cached.append(output.cached_tokens)
        take(self, output, known_versions)

    monkeypatch.setattr(Sample, "take", noting)
    bench.ask(PROMPTS[1], samples=8).result(WAIT_SECONDS)
    assert cached == [len(PROMPTS[1]) - 1] * 8


def test_scores_at_another_temperature_are_refused(bench: Bench) -> None:
    bench.swap(1.0)
    with pytest.raises(EngineError, match="at temperature 1 only"):
        bench.engine.score([[3, 4]], 0.5).result(WAIT_SECONDS)


def test_status_names_what_runs(bench: Bench) -> None:
    bench.swap(1.0)
    health = bench.engine.health()
    assert health.alive
    assert health.detail.startswith("sglang 0.5.23 on ")
