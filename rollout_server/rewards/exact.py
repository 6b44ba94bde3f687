"""Exact match."""

from rollout_server.rewards.outcome import RewardItem


def exact(item: RewardItem) -> float:
    """1 if response and label are the same text, ignoring spaces at both ends; an empty response is wrong.

    A row without a label is an error, not a wrong answer.
    """
    if item.label is None:
        raise ValueError("reward 'exact' needs a label, the data row has none")
    return float(bool(item.response.strip()) and item.response.strip() == item.label.strip())
