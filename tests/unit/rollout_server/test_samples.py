import numpy as np
import pytest

from relax_common.rows import RewardStatus
from relax_queue.client import ROW_FIELDS
from relax_queue.rows.column_block import encode, read_table
from relax_queue.rows.spec import form_of
from rollout_server.engines.contract import Completion, FinishReason
from rollout_server.rewards.outcome import RewardOutcome
from rollout_server.trajectory.samples import (
    GroupVerdict,
    SampleRows,
    Scored,
    judge_group,
    make_rows,
    no_rows,
    row_columns,
)

OK, ERROR, TIMEOUT, INVALID = RewardStatus
RIGHT = RewardOutcome(OK, 1.0)


def completion(response: int) -> Completion:
    return Completion(
        np.arange(5, 5 + response, dtype=np.int32),
        np.full(response, -0.5, np.float32),
        np.full(response, 3, np.int64),
        FinishReason.STOP,
    )


def rows(*responses: int, outcome: RewardOutcome = RIGHT) -> SampleRows:
    """Rows of responses of these lengths."""
    return make_rows(
        range(len(responses)), [1, 2, 3], [completion(each) for each in responses], 0.5, [outcome] * len(responses)
    )


def test_rows_mark_exactly_the_sampled_tokens() -> None:
    made = rows(2, 1)
    assert made.tokens.tolist() == [1, 2, 3, 5, 6, 1, 2, 3, 5]
    assert made.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1]
    assert made.log_probs.tolist() == [0, 0, 0, -0.5, -0.5, 0, 0, 0, -0.5]
    assert made.versions.tolist() == [-1, -1, -1, 3, 3, -1, -1, -1, 3]
    assert made.offsets.tolist() == [0, 5, 9]
    assert made.n_sampled == 3


def test_an_empty_response_is_a_row_without_trained_tokens() -> None:
    made = rows(0, 1)
    assert made.tokens.tolist() == [1, 2, 3, 1, 2, 3, 5]
    assert made.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert made.offsets.tolist() == [0, 3, 7]


def test_rows_become_the_columns_that_the_queue_wants() -> None:
    columns = row_columns(rows(2, 0))
    entries = read_table(encode(columns)).entries
    assert list(columns) == [field.name for field in ROW_FIELDS]
    for field in ROW_FIELDS:
        assert (entries[field.name].form, entries[field.name].units) == (form_of(field), 2)


def test_without_samples_there_are_no_rows_and_no_columns() -> None:
    assert len(no_rows()) == 0
    assert no_rows().scored() == []
    assert row_columns(no_rows()) == {}


def test_I11_a_reward_that_is_no_reward_is_kept_as_zero_with_its_status() -> None:
    assert rows(1, outcome=RewardOutcome(TIMEOUT, 7.0)).scored() == [Scored(0.0, TIMEOUT)]


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
