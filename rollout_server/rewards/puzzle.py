"""Scorers of reasoning-gym, for rows that data.generator = "reasoning_gym:NAME" made."""

import re

import reasoning_gym

from rollout_server.rewards.outcome import RewardItem

KEY = "reasoning_gym"
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def puzzle(item: RewardItem) -> float:
    """What the set's own scorer gives to the text in the last <answer> tag, or to the whole response without one.

    An empty answer is 0 here although some scorers give it a little: in a group of failures that would look like a
    difference to learn from.
    """
    carried = item.metadata.get(KEY)
    if not isinstance(carried, dict) or "entry" not in carried:
        raise ValueError(f"reward 'reasoning_gym' needs the metadata {KEY!r} that data.generator puts into a row")
    answer = puzzle_answer(item.response)
    if not answer:
        return 0.0
    return float(reasoning_gym.get_score_answer_fn(carried["dataset"])(answer, carried["entry"]))


def puzzle_answer(response: str) -> str:
    """An opened tag that is never closed was cut off: no answer."""
    tagged = _TAGGED.findall(response)
    if response.rfind("<answer>") > response.rfind("</answer>"):
        return ""
    return (tagged[-1] if tagged else response).strip()
