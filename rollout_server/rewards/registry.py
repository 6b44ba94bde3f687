"""Reward functions by name, or by import path for a user's own."""

import difflib
import importlib
import json
from collections.abc import Mapping

from rollout_server.rewards.weighted import RewardFunction, weighted_sum

BUILT_IN = {
    "exact": "rollout_server.rewards.exact:exact",
    "numeric": "rollout_server.rewards.numeric:numeric",
    "math": "rollout_server.rewards.math_answer:math_answer",
    "reasoning_gym": "rollout_server.rewards.puzzle:puzzle",
}


# What a built-in reward imports beyond the package's own dependencies, and the extra that brings it.
EXTRAS = {"math": ("math_verify", "math"), "reasoning_gym": ("reasoning_gym", "tasks")}


class UnknownReward(ValueError):
    """No such reward; the message says which there are."""


def reward_spec(name: str, parts: Mapping[str, float]) -> str:
    """One text for a reward or a weighted sum, as a worker is started with."""
    return json.dumps(dict(parts)) if parts else name


def resolve_spec(spec: str) -> RewardFunction:
    if not spec.startswith("{"):
        return resolve(spec)
    weights: dict[str, float] = json.loads(spec)
    return weighted_sum({name: (resolve(name), weight) for name, weight in weights.items()})


def resolve(name: str) -> RewardFunction:
    """The function behind "exact" or "package.module:function"."""
    path = BUILT_IN.get(name, name)
    module_name, separator, attribute = path.partition(":")
    if not separator:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(BUILT_IN)}"
        raise UnknownReward(f"no reward {name!r}: {hint} (your own: 'package.module:function')")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        library, extra = EXTRAS.get(name, ("", ""))
        if library and error.name == library:
            raise UnknownReward(f"reward {name!r} needs {library}: pip install 'relax-rl[{extra}]'") from error
        raise UnknownReward(f"reward {name!r}: cannot import {module_name}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UnknownReward(f"reward {name!r}: {module_name} has no function {attribute!r}")
    return function  # type: ignore[no-any-return]
