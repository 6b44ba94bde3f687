import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import cast

import numpy as np
import pytest

from relax_common.rows import RewardStatus
from rollout_server.engines.contract import Completion, Engine, FinishReason, GenerateRequest, SamplingParams
from rollout_server.rewards.outcome import RewardItem, RewardOutcome
from rollout_server.rewards.pool import RewardPool
from rollout_server.tokenizers import PromptError, TextTokenizer
from rollout_server.workflows.base import GroupResult, GroupTask
from rollout_server.workflows.single_turn import SingleTurn


class Letters:
    """Token id = character code."""

    def encode_prompt(self, prompt: str) -> list[int]:
        return [ord(letter) for letter in prompt]

    def begun_text(self, prompt: str) -> str:
        return ""

    def decode_responses(self, responses: Sequence[Sequence[int]]) -> list[str]:
        return ["".join(map(chr, token_ids)) for token_ids in responses]


class Canned:
    """Answers with given texts; '!' marks an aborted one."""

    def __init__(self, answers: list[str]) -> None:
        self.answers = answers
        self.requests: list[GenerateRequest] = []

    def generate(self, request: GenerateRequest) -> Future[list[Completion]]:
        self.requests.append(request)
        future: Future[list[Completion]] = Future()
        future.set_result([completion(text) for text in self.answers])
        return future


class Lengths:
    """Rewards the length; 'x' is an error."""

    def __init__(self) -> None:
        self.items: list[RewardItem] = []

    def score(self, items: list[RewardItem]) -> Future[list[RewardOutcome]]:
        self.items = items
        future: Future[list[RewardOutcome]] = Future()
        future.set_result(
            [
                RewardOutcome(RewardStatus.ERROR, reason="x is no answer")
                if item.response == "x"
                else RewardOutcome(RewardStatus.OK, float(len(item.response)))
                for item in items
            ]
        )
        return future


def completion(text: str) -> Completion:
    size = len(text)
    reason = FinishReason.ABORT if text.endswith("!") else FinishReason.LENGTH
    return Completion(
        np.array([ord(letter) for letter in text], np.int32),
        np.zeros(size, np.float32),
        np.zeros(size, np.int64),
        reason,
    )


def run(answers: list[str], samples: list[int], prompt: str = "2+2=") -> tuple[GroupResult, Canned, Lengths]:
    engine, rewards = Canned(answers), Lengths()
    workflow = SingleTurn(
        cast(Engine, engine),
        cast(TextTokenizer, Letters()),
        cast(RewardPool, rewards),
        SamplingParams(0.5, 3),
        prompt_tokens_max=8,
        generate_timeout_seconds=5.0,
    )
    task = GroupTask("0/0/0", "0/0/0#1", prompt, "4", {"level": 1}, samples)
    return asyncio.run(workflow.run(task)), engine, rewards


def test_every_finished_sample_becomes_a_row_under_its_index() -> None:
    result, engine, rewards = run(["4", "", "44"], [1, 4, 5])
    assert result.rows.samples == (1, 4, 5)
    assert result.rows.rewards.tolist() == [1, 0, 2]
    assert result.rows.temperatures.tolist() == [0.5, 0.5, 0.5]
    assert engine.requests[0].n_samples == 3
    assert rewards.items[0] == RewardItem("2+2=", "4", "4", {"level": 1})
    assert result.generation_start_unix_seconds <= result.generation_end_unix_seconds


def test_aborted_samples_are_neither_scored_nor_kept() -> None:
    result, _, rewards = run(["4", "4!", "44"], [0, 1, 2])
    assert result.rows.samples == (0, 2)
    assert len(rewards.items) == 2


def test_I11_a_failed_reward_keeps_its_status_and_reason() -> None:
    result, _, _ = run(["x", "4"], [0, 1])
    assert result.rows.statuses.tolist() == [RewardStatus.ERROR, RewardStatus.OK]
    assert result.reward_reasons == ["x is no answer"]


def test_a_group_that_an_earlier_lease_left_complete_asks_nothing() -> None:
    result, engine, _ = run([], [])
    assert len(result.rows) == 0
    assert engine.requests == []


@pytest.mark.parametrize(
    ("prompt", "message"), [("", "no tokens"), ("123456789", "9 tokens, data.prompt_tokens_max = 8")]
)
def test_a_prompt_that_does_not_fit_is_refused(prompt: str, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        run([], [0], prompt)
