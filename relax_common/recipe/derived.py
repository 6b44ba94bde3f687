"""Sizes and budgets that follow from a recipe: computed once, checked, printed, used by every daemon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relax_common.errors import InvalidInput
from relax_common.recipe.schema import Recipe
from relax_common.rows import PRODUCER, Field, bytes_per_group, fields_written_by

PARAMETER_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ColumnRole:
    """A role that computes a field of its own for every planned row. It uses the weights in `model_path`, or, if that
    is empty, those of the version being trained; a `trained` one starts from them and is trained itself."""

    name: str
    tensor_parallel_size: int
    model_path: str
    trained: bool = False

    @property
    def follows_versions(self) -> bool:
        """Whether it must know version s before it reads rows of step s."""
        return self.trained or not self.model_path

    @property
    def field(self) -> str:
        (own,) = fields_written_by((self.name,))
        return own.name


def column_roles(recipe: Recipe) -> tuple[ColumnRole, ...]:
    """The roles beside the actor that the algorithm needs."""
    roles = []
    if "actor_fwd" in recipe.algorithm.roles:
        roles.append(ColumnRole("actor_fwd", recipe.actor_fwd.tensor_parallel_size, ""))
    if "reference" in recipe.algorithm.roles:
        path = recipe.reference.path or str(recipe.model.path)
        roles.append(ColumnRole("reference", recipe.reference.tensor_parallel_size, path))
    if "teacher" in recipe.algorithm.roles:
        roles.append(ColumnRole("teacher", recipe.teacher.tensor_parallel_size, recipe.teacher.path))
    if "critic" in recipe.algorithm.roles:
        path = recipe.critic.path or str(recipe.model.path)
        roles.append(ColumnRole("critic", recipe.critic.tensor_parallel_size, path, trained=True))
    return tuple(roles)


def roles_of(forward: Sequence[ColumnRole]) -> tuple[str, ...]:
    """Names of all roles of a run with these roles beside the actor."""
    return (PRODUCER, "actor", *(role.name for role in forward))


@dataclass(frozen=True)
class Derived:
    """Everything a daemon would otherwise compute for itself."""

    samples_per_step: int
    tokens_per_row_max: int
    bytes_per_group: int
    queue_bytes_needed: int
    actor_ranks: int
    groups_open_max: int
    samples_in_flight_max: int
    refills_per_step_max: int
    groups_per_chunk: int
    decay_updates: int
    column_roles: tuple[ColumnRole, ...]
    optional_fields: tuple[str, ...]

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the roles that take part in the run."""
        return roles_of(self.column_roles)

    @property
    def fields(self) -> tuple[Field, ...]:
        """The schema of the run's rows."""
        return fields_written_by(self.roles, self.optional_fields)

    def lines(self) -> list[str]:
        """A description for people, one fact per line."""
        return [
            f"samples_per_step      {self.samples_per_step}",
            f"tokens_per_row_max    {self.tokens_per_row_max}",
            f"groups_open_max       {self.groups_open_max}",
            f"bytes_per_group       {self.bytes_per_group}",
            f"queue_bytes_needed    {self.queue_bytes_needed}",
            f"actor_ranks           {self.actor_ranks}",
            f"samples_in_flight_max {self.samples_in_flight_max} per rollout server",
            f"groups_per_chunk      {self.groups_per_chunk}",
            *(
                f"role {role.name:<16} {role.tensor_parallel_size} ranks, writes {role.field}"
                for role in self.column_roles
            ),
        ]


def derive(recipe: Recipe) -> Derived:
    """Raises InvalidInput if a budget cannot hold what the recipe asks for."""
    row_tokens = recipe.data.prompt_tokens_max + recipe.sampling.max_new_tokens
    roles = column_roles(recipe)
    optional = recipe.algorithm.optional_fields
    group_bytes = bytes_per_group(fields_written_by(roles_of(roles), optional), recipe.samples_per_prompt, row_tokens)
    steps_held = recipe.max_staleness + 1 + recipe.snapshot_every
    needed = group_bytes * recipe.prompts_per_step * steps_held
    if needed > recipe.queue.memory_budget_bytes:
        raise InvalidInput(
            f"queue.memory_budget_bytes = {recipe.queue.memory_budget_bytes} cannot hold max_staleness + 1 + "
            f"snapshot_every = {steps_held} steps of {recipe.prompts_per_step} groups x {group_bytes} bytes = {needed} "
            "bytes; raise it or lower prompts_per_step, samples_per_prompt, max_staleness or the token limits"
        )
    updates_per_step = recipe.algorithm.updates_per_step * recipe.algorithm.passes_per_step
    decay_updates = recipe.optimizer.decay_updates or recipe.total_steps * updates_per_step
    if recipe.optimizer.schedule == "cosine" and decay_updates <= recipe.optimizer.warmup_updates:
        raise InvalidInput(
            f"optimizer.schedule = 'cosine' falls from the end of the warm-up to update {decay_updates}, and "
            f"optimizer.warmup_updates = {recipe.optimizer.warmup_updates}: shorten the warm-up or raise "
            f"{'optimizer.decay_updates' if recipe.optimizer.decay_updates else 'total_steps'}"
        )
    samples = recipe.prompts_per_step * recipe.samples_per_prompt
    return Derived(
        samples_per_step=samples,
        tokens_per_row_max=row_tokens,
        bytes_per_group=group_bytes,
        queue_bytes_needed=needed,
        actor_ranks=recipe.actor.tensor_parallel_size * recipe.actor.data_parallel_size,
        groups_open_max=(recipe.max_staleness + 1) * recipe.prompts_per_step,
        samples_in_flight_max=recipe.rollout.samples_in_flight_max or samples,
        refills_per_step_max=recipe.max_refills_per_step or recipe.prompts_per_step,
        groups_per_chunk=recipe.actor.groups_per_chunk or recipe.prompts_per_step,
        decay_updates=decay_updates,
        column_roles=roles,
        optional_fields=optional,
    )
