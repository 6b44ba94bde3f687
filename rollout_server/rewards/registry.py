"""Reward functions by name, or by import path for a user's own."""

import difflib
import importlib
from collections.abc import Callable

from rollout_server.rewards.outcome import RewardItem

RewardFunction = Callable[[RewardItem], object]

BUILT_IN = {
    "exact": "rollout_server.rewards.exact:exact",
    "numeric": "rollout_server.rewards.numeric:numeric",
}


class UnknownReward(ValueError):
    """No such reward; the message says which there are."""


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
        raise UnknownReward(f"reward {name!r}: cannot import {module_name}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UnknownReward(f"reward {name!r}: {module_name} has no function {attribute!r}")
    return function  # type: ignore[no-any-return]
