"""Several rewards as one: their weighted sum."""

from collections.abc import Callable, Mapping

from relax_common.rows import RewardStatus
from rollout_server.rewards.outcome import Reward, RewardItem, interpret

RewardFunction = Callable[[RewardItem], object]


class PartFailed(ValueError):
    """A part raised nothing but gave no reward either; the message says which."""


def weighted_sum(parts: Mapping[str, tuple[RewardFunction, float]]) -> RewardFunction:
    """A part that returns None abstains: the others share its weight, so that a sample whose judge has nothing to say
    is neither punished nor dropped. If all abstain there is no reward (INVALID).

    A part that raises, or returns no finite number, fails the whole sample: the rest of a sum is no reward.
    """
    total = sum(abs(weight) for _, weight in parts.values())

    def reward(item: RewardItem) -> object:
        value = spoken = 0.0
        values: dict[str, float] = {}
        for name, (function, weight) in parts.items():
            returned = function(item)
            if returned is None:
                continue
            outcome = interpret(returned)
            if outcome.status is not RewardStatus.OK:
                raise PartFailed(f"part {name!r}: {outcome.reason}")
            value += weight * outcome.value
            spoken += abs(weight)
            values |= {name: outcome.value} | {f"{name}.{part}": each for part, each in outcome.parts.items()}
        return Reward(value * (total / spoken), values) if spoken else None

    return reward
