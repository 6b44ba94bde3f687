"""How the pool and its workers talk: one JSON object a line."""

import json
from typing import Any

from relax_common.rows import RewardStatus
from rollout_server.rewards.outcome import RewardItem, RewardOutcome


def encode_items(items: list[RewardItem]) -> bytes:
    rows = [[item.prompt, item.response, item.label, dict(item.metadata)] for item in items]
    return json.dumps(rows).encode() + b"\n"


def decode_items(line: str) -> list[RewardItem]:
    return [RewardItem(prompt, response, label, metadata) for prompt, response, label, metadata in json.loads(line)]


def encode_outcome(outcome: RewardOutcome) -> str:
    return json.dumps([int(outcome.status), outcome.value, dict(outcome.parts), outcome.reason])


def decode_outcome(line: bytes) -> RewardOutcome:
    status, value, parts, reason = json.loads(line)
    return RewardOutcome(RewardStatus(status), value, parts, reason)


def encode_started(error: str) -> str:
    """A worker's first line; `error` is empty when it is ready."""
    return json.dumps({"error": error})


def decode_started(line: bytes) -> str:
    answer: dict[str, Any] = json.loads(line)
    return str(answer["error"])
