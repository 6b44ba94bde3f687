"""Checks that a model can be divided as the recipe says: one line instead of a later error from Megatron."""

from __future__ import annotations

from relax_common.errors import InvalidInput
from relax_common.recipe import Derived, Recipe
from relaxd.plan.model import ModelSizes


def check_tensor_parallel(tp: int, section: str, model: ModelSizes) -> None:
    """`section` is the recipe section whose parallel sizes are checked."""
    if tp > 1 and model.experts:
        raise InvalidInput(
            f"{section}.tensor_parallel_size = {tp}: a model with experts is divided by actor.expert_parallel_size, "
            "not by tensor parallelism"
        )
    for what, size in (("attention heads", model.heads), ("key-value heads", model.kv_heads), ("ffn", model.ffn)):
        if size % tp:
            raise InvalidInput(
                f"{section}.tensor_parallel_size = {tp} does not divide the model's {size} {what}; use data parallelism"
            )


def check_expert_parallel(recipe: Recipe, model: ModelSizes) -> None:
    size, ranks = recipe.actor.expert_parallel_size, recipe.actor.data_parallel_size
    if size == 1:
        return
    if not model.experts:
        raise InvalidInput(f"actor.expert_parallel_size = {size}: the model has no experts; use data parallelism")
    parts = ((f"the model's {model.experts} experts", model.experts), (f"actor.data_parallel_size = {ranks}", ranks))
    for what, count in parts:
        if count % size:
            raise InvalidInput(f"actor.expert_parallel_size = {size} does not divide {what}")


def check_engine_parallel(recipe: Recipe, model: ModelSizes) -> None:
    size = recipe.rollout.devices_per_server
    if size > 1 and model.heads % size:
        raise InvalidInput(
            f"rollout.engine_options.tp_size = {size} does not divide the model's {model.heads} attention heads"
        )


def check_context(derived: Derived, model: ModelSizes) -> None:
    row = derived.tokens_per_row_max
    if model.context and row > model.context:
        raise InvalidInput(
            f"data.prompt_tokens_max + sampling.max_new_tokens = {row} exceeds the model's context of {model.context} "
            "tokens"
        )
