import math

import pytest

from relax_common.rows import RewardStatus
from rollout_server.rewards.match import exact, numeric
from rollout_server.rewards.outcome import Reward, RewardItem, interpret
from rollout_server.rewards.registry import UnknownReward, resolve


def item(response: str, label: str | None) -> RewardItem:
    return RewardItem("", response, label, {})


@pytest.mark.parametrize(
    ("response", "label", "value"), [("07", "07", 1), (" 07\n", "07", 1), ("7", "07", 0), ("", "07", 0), ("", "", 0)]
)
def test_exact_compares_text_without_outer_spaces(response: str, label: str, value: float) -> None:
    assert exact(item(response, label)) == value


@pytest.mark.parametrize(
    ("response", "label", "value"),
    [
        ("so it is 42.", "42", 1),
        ("42 then 43", "42", 0),
        ("0.5", "1/2", 1),
        ("1,234", "1234", 1),
        ("5e-1", "0.5", 1),
        ("-3", "-3", 1),
        ("7*8=56\n#### 56\n" + "This agrees with the check of 7 and 8. " * 20, "56", 1),
        ("no number", "56", 0),
        ("", "56", 0),
        ("1/0", "0", 0),
        ("1e999999999", "1", 0),
        ("9" * 100_000, "9", 0),
    ],
)
def test_numeric_compares_final_numbers_exactly(response: str, label: str, value: float) -> None:
    assert numeric(item(response, label)) == value


@pytest.mark.parametrize("function", [exact, numeric])
def test_I11_a_missing_label_is_an_error(function: object) -> None:
    with pytest.raises(ValueError, match="needs a label"):
        function(item("1", None))  # type: ignore[operator]


@pytest.mark.parametrize("label", ["None", "x", "1 2", ""])
def test_I11_a_label_that_is_no_number_is_an_error(label: str) -> None:
    with pytest.raises(ValueError, match="needs a number"):
        numeric(item("1", label))


@pytest.mark.parametrize("returned", [0, 1.0, True, Reward(0.5, {"a": 1.0})])
def test_finite_numbers_are_ok(returned: object) -> None:
    assert interpret(returned).status is RewardStatus.OK


@pytest.mark.parametrize("returned", [None, math.nan, math.inf, "0.5", [1], Reward(1.0, {"a": math.nan})])
def test_I11_what_is_no_finite_number_is_invalid(returned: object) -> None:
    outcome = interpret(returned)
    assert outcome.status is RewardStatus.INVALID
    assert "wanted a finite number" in outcome.reason


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("exat", "did you mean 'exact'"),
        ("judge", "known: exact, numeric, math, reasoning_gym"),
        ("no_such_module:f", "cannot import"),
        ("json:no_such", "has no function"),
    ],
)
def test_an_unknown_reward_says_what_to_do(name: str, hint: str) -> None:
    with pytest.raises(UnknownReward, match=hint):
        resolve(name)


def test_a_reward_is_found_by_import_path() -> None:
    assert resolve("math:sqrt") is math.sqrt
