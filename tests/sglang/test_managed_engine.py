"""The managed engine against the suite that every engine passes, and what only it does."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_conformance import (
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

from rollout_server.engines.sglang.engine import SglangEngine

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
def bench(start_engine: object, endless_qwen3: Path) -> Bench:
    engine: SglangEngine = start_engine(endless_qwen3)  # type: ignore[operator]
    return Bench.of(engine, endless_qwen3)
