"""Weighted sums, and the scorers of generated puzzles."""

import json
import sys
from typing import Any

import pytest

from relax_common.recipe.data import Data
from relax_common.rows import RewardStatus
from relaxd.data import read_prompts
from rollout_server.rewards.outcome import Reward, RewardItem
from rollout_server.rewards.puzzle import puzzle, puzzle_answer
from rollout_server.rewards.registry import UnknownReward, resolve, resolve_spec, reward_spec, weighted_sum
from rollout_server.rewards.worker import score

ITEM = RewardItem("", "12", "12", {})


def summed(**parts: tuple[object, float]) -> Any:
    def function(value: object) -> Any:
        return lambda item: value

    return score(weighted_sum({name: (function(value), weight) for name, (value, weight) in parts.items()}), ITEM)


def test_a_weighted_sum_keeps_the_values_of_its_parts() -> None:
    outcome = summed(right=(1, 0.8), short=(Reward(0.5, {"words": 7}), 0.2))
    assert outcome.value == pytest.approx(0.9)
    assert outcome.parts == {"right": 1.0, "short": 0.5, "short.words": 7.0}


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_part_that_abstains_leaves_its_share_to_the_others(value: float) -> None:
    outcome = summed(right=(value, 0.5), judge=(None, 0.5))
    assert (outcome.status, outcome.value, outcome.parts) == (RewardStatus.OK, value, {"right": value})
    assert summed(right=(1, 2.0), length=(None, -1.0)).value == pytest.approx(3.0)


def test_I11_where_all_parts_abstain_there_is_no_reward() -> None:
    assert summed(right=(None, 0.5), judge=(None, 0.5)).status is RewardStatus.INVALID


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "0.5"])
def test_I11_a_part_that_gives_no_number_fails_the_sample_and_is_named(value: object) -> None:
    outcome = summed(right=(1, 0.5), judge=(value, 0.5))
    assert outcome.status is RewardStatus.ERROR
    assert "part 'judge'" in outcome.reason


def test_a_spec_is_one_reward_or_the_parts_of_the_recipe() -> None:
    assert score(resolve_spec(reward_spec("exact", {})), ITEM).value == 1.0
    both = resolve_spec(reward_spec("exact", {"exact": 0.25, "numeric": 0.5}))
    assert score(both, ITEM).value == pytest.approx(0.75)
    with pytest.raises(UnknownReward, match="did you mean 'exact'"):
        resolve_spec(reward_spec("exact", {"exat": 1.0}))


@pytest.mark.parametrize(
    ("name", "library", "extra"), [("math", "math_verify", "math"), ("reasoning_gym", "reasoning_gym", "tasks")]
)
def test_a_missing_library_is_named_with_its_extra(
    name: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("rollout_server.rewards.math_answer", "rollout_server.rewards.puzzle"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UnknownReward, match=rf"needs {library}: pip install 'relax-rl\[{extra}\]'"):
        resolve(name)


def items(name: str, responses: list[str]) -> list[RewardItem]:
    """As they reach a worker: through JSON."""
    row = read_prompts(Data(generator=f"reasoning_gym:{name}", generator_rows=1, generator_seed=3))[0]
    return [RewardItem(row.prompt, response, row.label, json.loads(row.metadata_json)) for response in responses]


def test_a_puzzle_without_a_single_answer_is_scored_by_its_set() -> None:
    entry = items("graph_color", [""])[0].metadata["reasoning_gym"]["entry"]
    solution = json.dumps(entry["metadata"]["possible_answer"])
    responses = [f"<think>hm</think><answer>{solution}</answer>", solution, "", "<answer></answer>", "<answer>{"]
    assert [puzzle(each) for each in items("graph_color", responses)] == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_an_empty_answer_is_zero_where_the_library_pays_a_little() -> None:
    assert [puzzle(each) for each in items("fraction_simplification", ["", "  ", "<answer> </answer>"])] == [0, 0, 0]


def test_I11_a_row_that_is_no_puzzle_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs the metadata 'reasoning_gym'"):
        puzzle(ITEM)


def test_the_last_tag_is_the_answer() -> None:
    assert puzzle_answer("<answer>1</answer> no <answer> 2\n3 </answer> done") == "2\n3"
