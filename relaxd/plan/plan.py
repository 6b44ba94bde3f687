"""The resolved plan of a recipe: who runs where on what, and that it fits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from relax_common.errors import InvalidInput
from relax_common.recipe import Derived, Recipe, derive
from relaxd.plan.devices import Assignment, assign_devices
from relaxd.plan.layouts import check_context, check_engine_parallel, check_expert_parallel, check_tensor_parallel
from relaxd.plan.memory import (
    RESERVED_BYTES,
    DcsBytes,
    EngineRoom,
    RankBytes,
    actor_rank_bytes,
    critic_rank_bytes,
    dcs_bytes,
    engine_room,
    forward_rank_bytes,
)
from relaxd.plan.model import ModelSizes, model_sizes, read_model_config


@dataclass(frozen=True)
class Plan:
    """`forward` is by role, in the order of `derived.column_roles`; `microbatches` is the number per rank and step."""

    derived: Derived
    model: ModelSizes
    assignment: Assignment
    actor: RankBytes
    forward: tuple[RankBytes, ...]
    engine: EngineRoom | None
    dcs: DcsBytes
    rollout_host_bytes: int
    """Host memory of one rollout server: a version as received from dcs (on the same host it is mapped, not owned), as
    handed to the engine, and the engine's copy before the swap."""
    tokens_per_step_max: int
    microbatches: int
    """The number if every row is as long as allowed."""


def make_plan(recipe: Recipe) -> Plan:
    """Needs no weights and no data. Raises InvalidInput, which names the key, where something does not fit."""
    derived = derive(recipe)
    model = model_sizes(read_model_config(recipe.model.path))
    check_tensor_parallel(recipe.actor.tensor_parallel_size, "actor", model)
    check_expert_parallel(recipe, model)
    check_engine_parallel(recipe, model)
    check_context(derived, model)
    forward = []
    for role in derived.column_roles:
        own = model_sizes(read_model_config(Path(role.model_path), f"{role.name}.path")) if role.model_path else model
        check_tensor_parallel(role.tensor_parallel_size, role.name, own)
        rank_bytes = critic_rank_bytes if role.trained else forward_rank_bytes
        forward.append(rank_bytes(recipe, own, role.tensor_parallel_size))
    rows_per_microbatch = recipe.actor.tokens_per_microbatch // derived.tokens_per_row_max
    rows_per_rank = -(-derived.samples_per_step // recipe.actor.data_parallel_size)
    plan = Plan(
        derived=derived,
        model=model,
        assignment=assign_devices(recipe, derived),
        actor=actor_rank_bytes(recipe, model),
        forward=tuple(forward),
        engine=engine_room(recipe, model),
        dcs=dcs_bytes(recipe, derived, model),
        rollout_host_bytes=3 * dcs_bytes(recipe, derived, model).version,
        tokens_per_step_max=derived.samples_per_step * derived.tokens_per_row_max,
        microbatches=-(-rows_per_rank // rows_per_microbatch),
    )
    _check_dcs(recipe, plan)
    if recipe.placement.gpus_per_host:
        _check_ranks(recipe, plan)
        _check_engine(recipe, plan)
    return plan


def _check_dcs(recipe: Recipe, plan: Plan) -> None:
    budget, dcs = recipe.dcs.memory_budget_bytes, plan.dcs
    if dcs.total > budget:
        raise InvalidInput(
            f"dcs.memory_budget_bytes = {budget} cannot hold {dcs.versions} versions x {dcs.version} + {dcs.states} "
            f"states x {dcs.state} = {dcs.total} bytes of {plan.model.elements} parameters; raise it"
        )


def _check_ranks(recipe: Recipe, plan: Plan) -> None:
    memory = recipe.placement.gpu_memory_bytes
    roles = zip(plan.derived.column_roles, plan.forward, strict=True)
    for name, needs in (("actor", plan.actor), *((role.name, needs) for role, needs in roles)):
        if needs.total > memory:
            raise InvalidInput(
                f"placement.gpu_memory_bytes = {memory} cannot hold a rank of {name}: parameters {needs.parameters} + "
                f"gradients {needs.gradients} + optimizer {needs.optimizer} + activations (estimate) "
                f"{needs.activations} + reserved {needs.reserved} = {needs.total} bytes; raise the parallel sizes of "
                f"{name}, set actor.recompute = 'full' or lower actor.tokens_per_microbatch"
            )


def _check_engine(recipe: Recipe, plan: Plan) -> None:
    room = plan.engine
    if room is None:
        return
    memory, row = recipe.placement.gpu_memory_bytes, plan.derived.tokens_per_row_max
    if room.cache_tokens < row:
        raise InvalidInput(
            f"placement.gpu_memory_bytes = {memory} x {room.memory_fraction} leave an engine on {room.devices} devices "
            f"room for {room.cache_tokens} tokens next to {room.weights} bytes of weights, one row has up to {row}; "
            "raise rollout.engine_options.tp_size"
        )
    if (1 - room.memory_fraction) * memory < RESERVED_BYTES:
        raise InvalidInput(
            f"rollout.engine_options.mem_fraction_static = {room.memory_fraction} leaves less than {RESERVED_BYTES} "
            f"bytes of placement.gpu_memory_bytes = {memory} for everything else; lower it"
        )
