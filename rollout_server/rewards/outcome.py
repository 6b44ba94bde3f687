"""What goes into a reward function and what comes out of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real

from relax_common.json_types import JsonMapping
from relax_common.rows import RewardStatus

FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class RewardItem:
    """One sample to score. `response` is only what the model generated. `prompt`, a text or chat messages, is what the
    model got; it is context and not graded. `begun` was written for the model at the start of its turn and is graded
    with its response: a message of the assistant to be continued, or a thinking block that the prompt has opened.
    """

    prompt: object
    response: str
    label: str | None
    metadata: JsonMapping
    begun: str = ""


@dataclass(frozen=True)
class Reward:
    """What a reward function may return if a bare number is not enough."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardOutcome:
    """`value` counts only where `status` is OK; `reason` is one line where it is not."""

    status: RewardStatus
    value: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


def interpret(returned: object) -> RewardOutcome:
    """A real number that float32 can hold, or a Reward of such, is OK; anything else is INVALID.

    A string is INVALID even where it spells a number: "0.5" is a formatting slip of the reward, not its value.
    """
    reward = returned if isinstance(returned, Reward) else Reward(value=returned)  # type: ignore[arg-type]
    for name, value in [("value", reward.value), *reward.parts.items()]:
        if not isinstance(value, Real) or not abs(value) <= FLOAT32_MAX:
            reason = f"reward {name} is {value!r:.80}, wanted a finite number that float32 can hold"
            return RewardOutcome(RewardStatus.INVALID, reason=reason)
    parts = {name: float(value) for name, value in reward.parts.items()}
    return RewardOutcome(RewardStatus.OK, float(reward.value), parts)


@dataclass(frozen=True)
class Overlong:
    """A penalty for answers near the limit (Yu et al. 2025, DAPO): 0 up to limit - buffer tokens, then falling in a
    straight line to -penalty at the limit and beyond."""

    limit_tokens: int
    buffer_tokens: int
    penalty: float

    def applied(self, outcome: RewardOutcome, tokens: int) -> RewardOutcome:
        """`tokens`: what the model has produced, its end token included. The penalty is a part of its own."""
        if outcome.status is not RewardStatus.OK:
            return outcome
        over = (tokens - (self.limit_tokens - self.buffer_tokens)) / self.buffer_tokens
        added = -self.penalty * min(max(over, 0.0), 1.0)
        return replace(outcome, value=outcome.value + added, parts={**outcome.parts, "overlong": added})
