"""Equality of numbers."""

import re
from fractions import Fraction

from rollout_server.rewards.outcome import RewardItem

ANSWER_MARKER = "####"
_CANDIDATE = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d+)*(?:\.\d+)?(?:[eE][-+]?\d+|/\d+)?")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
# The exact value of "1e999999999" or of a million digits would take for ever to build.
CHARACTERS_MAX = 100
EXPONENT_DIGITS_MAX = 3


def numeric(item: RewardItem) -> float:
    """1 if the response's final number equals the label, compared exactly ("0.5" = "1/2" = "5e-1", "1,000" = "1000").

    The final number is the first one behind the last "####" where there is such a marker, else the last one in the
    response; a response without a number is wrong. A label that is no number is an error, not a wrong answer.
    """
    if item.label is None:
        raise ValueError("reward 'numeric' needs a label, the data row has none")
    wanted = parse_number(item.label)
    if wanted is None:
        raise ValueError(f"reward 'numeric' needs a number as label, got {item.label!r:.60}")
    return float(final_number(item.response) == wanted)


def final_number(response: str) -> Fraction | None:
    _, marker, answer = response.rpartition(ANSWER_MARKER)
    found = _CANDIDATE.findall(answer)
    if not found:
        return None
    return parse_number(found[0] if marker else found[-1])


def parse_number(text: str) -> Fraction | None:
    """The exact value of one number and nothing else; None for anything else, absurdly long numbers included."""
    stripped = text.strip()
    if len(stripped) > CHARACTERS_MAX or not _CANDIDATE.fullmatch(stripped):
        return None
    if "," in stripped and not _GROUPED.fullmatch(stripped):
        return None
    plain = stripped.replace(",", "").lower()
    _, has_exponent, exponent = plain.partition("e")
    if has_exponent and len(exponent.lstrip("+-")) > EXPONENT_DIGITS_MAX:
        return None
    if "/" in plain:
        numerator, _, denominator = plain.partition("/")
        return Fraction(numerator) / int(denominator) if int(denominator) else None
    return Fraction(plain)
