"""Reward functions by name, by import path for a user's own, or several of them as a weighted sum."""

import difflib
import importlib
import json
from collections.abc import Callable, Mapping

from relax_common.rows import RewardStatus
from rollout_server.rewards.outcome import Reward, RewardItem, interpret

RewardFunction = Callable[[RewardItem], object]

BUILT_IN = {
    "exact": "rollout_server.rewards.match:exact",
    "numeric": "rollout_server.rewards.match:numeric",
    "math": "rollout_server.rewards.math_answer:math_answer",
    "reasoning_gym": "rollout_server.rewards.puzzle:puzzle",
}


# What a built-in reward imports beyond the package's own dependencies, and the extra that brings it.
EXTRAS = {"math": ("math_verify", "math"), "reasoning_gym": ("reasoning_gym", "tasks")}


LABEL_READERS = {
    "numeric": "rollout_server.rewards.match:read_label",
    "math": "rollout_server.rewards.math_answer:read_label",
}
"""Functions that raise ValueError for a label that the reward cannot read; a user's reward may carry one as its
attribute `read_label`."""


class PartFailed(ValueError):
    """A part raised nothing but gave no reward either; the message says which."""


class UnknownReward(ValueError):
    """No such reward; the message says which there are."""


class NotInstalled(UnknownReward):
    """What the reward needs is not installed here; the message says how to install it."""


def reward_spec(name: str, parts: Mapping[str, float]) -> str:
    """One text for a reward or a weighted sum, as a worker is started with."""
    return json.dumps(dict(parts)) if parts else name


def resolve_spec(spec: str) -> RewardFunction:
    if not spec.startswith("{"):
        return resolve(spec)
    weights: dict[str, float] = json.loads(spec)
    return weighted_sum({name: (resolve(name), weight) for name, weight in weights.items()})


def label_readers(spec: str) -> list[Callable[[str], object]]:
    """One for each reward in `spec` that reads labels. Raises as resolve does."""
    names = [*json.loads(spec)] if spec.startswith("{") else [spec]
    readers = []
    for name in names:
        function = resolve(name)
        reader = (
            _imported(LABEL_READERS[name], name) if name in LABEL_READERS else getattr(function, "read_label", None)
        )
        readers += [reader] if reader is not None else []
    return readers


def resolve(name: str) -> RewardFunction:
    """The function that "exact" or "package.module:function" names."""
    path = BUILT_IN.get(name, name)
    if ":" not in path:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(BUILT_IN)}"
        raise UnknownReward(f"no reward {name!r}: {hint} (your own: 'package.module:function')")
    return _imported(path, name)


def _imported(path: str, name: str) -> Callable[..., object]:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        library, extra = EXTRAS.get(name, ("", ""))
        if library and error.name == library:
            raise NotInstalled(f"reward {name!r} needs {library}: pip install 'relax-rl[{extra}]'") from error
        raise UnknownReward(f"reward {name!r}: cannot import {module_name}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UnknownReward(f"reward {name!r}: {module_name} has no function {attribute!r}")
    found: Callable[..., object] = function
    return found


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
