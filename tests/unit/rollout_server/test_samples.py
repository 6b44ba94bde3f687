import numpy as np
import pytest

from rollout_server.engines.base import Completion, FinishReason
from rollout_server.rewards.outcome import RewardOutcome, RewardStatus
from rollout_server.samples import GroupVerdict, SampleRow, Scored, judge_group, make_row

OK, ERROR, TIMEOUT, INVALID = RewardStatus


def row(reward: float, status: RewardStatus = OK, response: int = 2) -> SampleRow:
    completion = Completion(
        np.arange(5, 5 + response, dtype=np.int32),
        np.full(response, -0.5, np.float32),
        np.full(response, 3, np.int64),
        FinishReason.STOP,
    )
    return make_row(0, [1, 2, 3], completion, 0.5, RewardOutcome(status, reward))


def test_a_row_marks_exactly_the_sampled_tokens() -> None:
    made = row(1.0)
    assert made.tokens.tolist() == [1, 2, 3, 5, 6]
    assert made.loss_mask.tolist() == [0, 0, 0, 1, 1]
    assert made.log_probs.tolist() == [0, 0, 0, -0.5, -0.5]
    assert made.versions.tolist() == [-1, -1, -1, 3, 3]
    assert [made.tokens.dtype, made.loss_mask.dtype, made.log_probs.dtype, made.versions.dtype] == [
        np.int32,
        np.uint8,
        np.float32,
        np.int64,
    ]


def test_an_empty_response_is_a_row_without_trained_tokens() -> None:
    made = row(0.0, response=0)
    assert made.tokens.tolist() == [1, 2, 3]
    assert not made.loss_mask.any()


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        ([(1, OK), (0, OK), (0, TIMEOUT), (0, ERROR)], GroupVerdict.OK),
        ([(1, OK), (1, OK), (0, TIMEOUT), (0, ERROR)], GroupVerdict.NO_SIGNAL),
        ([(0, OK), (0, INVALID), (0, ERROR)], GroupVerdict.FAILED),
        ([(0.1 + 0.2, OK), (0.3, OK)], GroupVerdict.OK),
        ([(0, OK), (0, OK)], GroupVerdict.NO_SIGNAL),
        ([], GroupVerdict.FAILED),
    ],
)
def test_I11_a_group_is_judged_by_its_valid_rewards_alone(
    rewards: list[tuple[float, RewardStatus]], verdict: GroupVerdict
) -> None:
    assert judge_group([Scored(value, status) for value, status in rewards], 2)[0] is verdict


def test_a_failed_group_says_why() -> None:
    _, reason = judge_group([Scored(0, TIMEOUT), Scored(0, ERROR), Scored(1, OK)], 2)
    assert reason == "1 of 3 rewards are valid (error, timeout)"
