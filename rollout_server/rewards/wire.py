"""How the pool and its workers talk: one JSON value per line, over two pipes that nothing else holds.

Each item carries a nonce and its answer repeats it. So a line that reached the pipe in any other way, from code that
writes to whatever descriptor it finds, is not taken for an answer.
"""

import json
import secrets
from dataclasses import dataclass

from relax_common.json_types import JsonObject
from relax_common.rows import RewardStatus
from rollout_server.rewards.outcome import RewardItem, RewardOutcome

ANSWER_BYTES_MAX = 1 << 20


class BrokenAnswer(ValueError):
    """What came over the pipe is no answer to the item that was asked."""


@dataclass(frozen=True)
class Question:
    nonce: str
    item: RewardItem


def ask(items: list[RewardItem]) -> list[Question]:
    return [Question(secrets.token_hex(8), item) for item in items]


def encode_questions(questions: list[Question]) -> bytes:
    rows = [
        [each.nonce, each.item.prompt, each.item.response, each.item.label, dict(each.item.metadata), each.item.begun]
        for each in questions
    ]
    return json.dumps(rows).encode() + b"\n"


def decode_questions(line: str) -> list[Question]:
    return [Question(nonce, RewardItem(*fields)) for nonce, *fields in json.loads(line)]


def encode_outcome(nonce: str, outcome: RewardOutcome) -> str:
    return json.dumps([nonce, int(outcome.status), outcome.value, dict(outcome.parts), outcome.reason])


def decode_outcome(nonce: str, line: bytes) -> RewardOutcome:
    """Raises BrokenAnswer for anything but the outcome of the item with this nonce."""
    try:
        given, status, value, parts, reason = json.loads(line)
        outcome = RewardOutcome(
            RewardStatus(status), float(value), {str(k): float(v) for k, v in parts.items()}, reason
        )
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenAnswer(f"its answer pipe carried {line[:80]!r}") from error
    if given != nonce or not isinstance(reason, str):
        raise BrokenAnswer(f"its answer pipe carried an answer to no question: {line[:80]!r}")
    return outcome


def encode_started(error: str) -> str:
    """A worker's first line; `error` is empty when it is ready."""
    return json.dumps({"error": error})


def decode_started(line: bytes) -> str:
    """Raises BrokenAnswer where the first line is something else."""
    try:
        answer: JsonObject = json.loads(line)
        return str(answer["error"])
    except (ValueError, TypeError, KeyError) as error:
        raise BrokenAnswer(f"its first line was {line[:80]!r}") from error
