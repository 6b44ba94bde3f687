"""What goes into a reward function and what comes out of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from relax_common.rows import RewardStatus


@dataclass(frozen=True)
class RewardItem:
    """One sample to score. `response` is only what the model generated; `prompt`, a text or chat messages, is what it
    got, a begun answer included: to know, not to grade."""

    prompt: object
    response: str
    label: str | None
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class Reward:
    """What a reward function may return where a bare number is not enough."""

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
    """A finite real number or a Reward of such is OK; anything else is INVALID.

    A string is INVALID even where it spells a number: "0.5" is a formatting slip of the reward, not its value.
    """
    reward = returned if isinstance(returned, Reward) else Reward(value=returned)  # type: ignore[arg-type]
    for name, value in [("value", reward.value), *reward.parts.items()]:
        if not isinstance(value, Real) or not math.isfinite(value):
            return RewardOutcome(RewardStatus.INVALID, reason=f"reward {name} is {value!r:.80}, wanted a finite number")
    parts = {name: float(value) for name, value in reward.parts.items()}
    return RewardOutcome(RewardStatus.OK, float(reward.value), parts)
