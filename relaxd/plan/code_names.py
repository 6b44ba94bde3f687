"""Which programs and functions a recipe names, and which of them relaxd may run for the sender of a recipe."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from relax_common.errors import InvalidInput
from relax_common.recipe import Recipe
from relax_common.recipe.algorithms import CustomConfig
from relaxd.data.generated import REASONING_GYM


@dataclass(frozen=True)
class CodeNames:
    """`programs`: interpreters by path. `imports`: functions as package.module:function, each by the key that names it.

    Rewards and generators that come with Relax are in neither.
    """

    programs: dict[str, str] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)


def code_names(recipe: Recipe) -> CodeNames:
    """The programs and functions outside Relax that the recipe would run, by recipe key."""
    programs, imports = {}, {}
    if recipe.rollout.engine_python:
        programs["rollout.engine_python"] = recipe.rollout.engine_python
    if recipe.data.generator and not recipe.data.generator.startswith(REASONING_GYM):
        imports["data.generator"] = recipe.data.generator
    rewards = {f"reward.parts.{name}": name for name in recipe.reward.parts} or {"reward.name": recipe.reward.name}
    imports |= {key: name for key, name in rewards.items() if ":" in name}
    if isinstance(recipe.algorithm, CustomConfig):
        named = {"algorithm.loss": recipe.algorithm.loss, "algorithm.estimator": recipe.algorithm.estimator}
        imports |= {key: name for key, name in named.items() if name}
    return CodeNames(programs, imports)


def check_allowed(recipe: Recipe, programs: Iterable[str], imports: Iterable[str]) -> None:
    """Raises InvalidInput for a program or function that is in neither list: a recipe that comes over the network may
    name only what the operator has allowed."""
    names = code_names(recipe)
    for given, allowed, key_of_config in (
        (names.programs, frozenset(programs), "allow_programs"),
        (names.imports, frozenset(imports), "allow_imports"),
    ):
        for key, name in given.items():
            if name not in allowed:
                raise InvalidInput(
                    f"{key} = {name!r} is not on this relaxd's list {key_of_config}; its operator can add it; "
                    "`relaxctl run` starts a relaxd of its own that allows what your recipe names"
                )
