"""Exact match of texts, and equality of numbers."""

from fractions import Fraction

from rollout_server.rewards.final_answer import after_thinking
from rollout_server.rewards.number_text import CANDIDATE, PlainNumber, ascii_numbers, parse_number, without_currency
from rollout_server.rewards.outcome import RewardItem

ANSWER_MARKER = "####"


def exact(item: RewardItem) -> float:
    """1 if response and label are the same text, ignoring spaces at both ends; an empty response is wrong.

    A row without a label is an error, not a wrong answer.
    """
    if item.label is None:
        raise ValueError("reward 'exact' needs a label, the data row has none")
    return float(bool(item.response.strip()) and item.response.strip() == item.label.strip())


def numeric(item: RewardItem) -> float:
    """1 if the response's final number equals the label, compared exactly ("0.5" = "1/2" = "5e-1", "1,000" = "1000").

    The final number is the first one after the last "####" where there is such a marker, else the last one in the
    response. A response without a number is wrong, and so is one that ends inside its thinking. A label that is not a
    number is an error, not a wrong answer.
    """
    if item.label is None:
        raise ValueError("reward 'numeric' needs a label, the data row has none")
    wanted = read_label(item.label)
    return float(final_number(item.begun + item.response) == wanted.value)


def read_label(text: str) -> PlainNumber:
    """Raises ValueError where the label is no number."""
    wanted = parse_number(without_currency(ascii_numbers(text)))
    if wanted is None:
        raise ValueError(f"reward 'numeric' needs a number as label, got {text!r:.60}")
    return wanted


def final_number(response: str) -> Fraction | None:
    spoken = after_thinking(response)
    if spoken is None:
        return None
    _, marker, answer = ascii_numbers(spoken).rpartition(ANSWER_MARKER)
    found = CANDIDATE.findall(answer)
    number = parse_number(found[0] if marker else found[-1]) if found else None
    return number.value if number else None
