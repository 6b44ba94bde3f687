"""The OpenRun requests that a run sends to the queue and to dcs. Pure functions."""

from __future__ import annotations

from pathlib import Path

from relax.dcs.v1 import dcs_pb2
from relax.queue.v1 import queue_pb2
from relax_common.recipe import Derived, Recipe, recipe_digest
from relax_common.rows import PRODUCER, Scope, fields_read_by

_SCOPES: dict[Scope, queue_pb2.Scope] = {
    "row": queue_pb2.SCOPE_ROW,
    "sample": queue_pb2.SCOPE_SAMPLE,
    "group": queue_pb2.SCOPE_GROUP,
}
_PACKERS = {
    "token_budget": queue_pb2.PACKER_TOKEN_BUDGET,
    "whole_groups": queue_pb2.PACKER_WHOLE_GROUPS,
    "sequential": queue_pb2.PACKER_SEQUENTIAL,
    "length_balanced": queue_pb2.PACKER_LENGTH_BALANCED,
}
_STALE_POLICIES = {
    "wait": queue_pb2.STALE_POLICY_WAIT,
    "mask": queue_pb2.STALE_POLICY_MASK,
    "regenerate": queue_pb2.STALE_POLICY_REGENERATE,
    "drop": queue_pb2.STALE_POLICY_DROP,
}
_DURABILITIES = {"metadata": queue_pb2.DURABILITY_METADATA, "full": queue_pb2.DURABILITY_FULL}
_CLOSINGS = {"all": queue_pb2.CLOSING_ALL, "min_n": queue_pb2.CLOSING_MIN_N}


def queue_request(run: str, recipe: Recipe, derived: Derived, dcs_address: str) -> queue_pb2.OpenRunRequest:
    """OpenRun of the queue: schema, sizes, budget."""
    fields = [
        queue_pb2.Field(
            name=field.name,
            dtype=field.dtype,
            shape=field.shape,
            scope=_SCOPES[field.scope],
            writer=field.writer,
            bytes_max=field.bytes_max,
        )
        for field in derived.fields
    ]
    followers = {"actor", *(role.name for role in derived.column_roles if role.follows_versions)}
    consumers = [
        queue_pb2.Consumer(
            name=role,
            fields=[field.name for field in fields_read_by(role, derived.roles, derived.optional_fields)],
            needs_version=queue_pb2.NEEDS_VERSION_STEP if role in followers else queue_pb2.NEEDS_VERSION_ANY,
        )
        for role in derived.roles
        if role != PRODUCER
    ]
    spec = queue_pb2.RunSpec(
        fields=fields,
        consumers=consumers,
        prompts_per_step=recipe.prompts_per_step,
        samples_per_prompt=recipe.samples_per_prompt,
        max_staleness=recipe.max_staleness,
        snapshot_every=recipe.snapshot_every,
        tokens_per_row_max=derived.tokens_per_row_max,
        tokens_per_microbatch=recipe.actor.tokens_per_microbatch,
        groups_per_chunk=derived.groups_per_chunk,
        data_parallel_size=recipe.actor.data_parallel_size,
        packer=_PACKERS[recipe.actor.packer],
        stale_policy=_STALE_POLICIES[recipe.stale_policy],
        min_valid_samples=recipe.min_valid_samples,
        max_refills_per_step=derived.refills_per_step_max,
        memory_budget_bytes=recipe.queue.memory_budget_bytes,
        lease_ttl_seconds=recipe.queue.lease_ttl_seconds,
        total_steps=recipe.total_steps,
        durability=_DURABILITIES[recipe.queue.durability],
        seed=recipe.seed,
        deterministic=recipe.queue.deterministic,
        closing=_CLOSINGS[recipe.queue.closing],
        closing_min_prompts=recipe.queue.closing_min_prompts,
        closing_deadline_seconds=recipe.queue.closing_deadline_seconds,
        lease_attempts_max=recipe.queue.lease_attempts_max,
    )
    return queue_pb2.OpenRunRequest(run=run, recipe_digest=recipe_digest(recipe), spec=spec, dcs_address=dcs_address)


def dcs_request(run: str, recipe: Recipe, derived: Derived, run_dir: Path) -> dcs_pb2.OpenRunRequest:
    """OpenRun of dcs: budget, who puts snapshots, what is kept on disk."""
    return dcs_pb2.OpenRunRequest(
        run=run,
        memory_budget_bytes=recipe.dcs.memory_budget_bytes,
        snapshot_every=recipe.snapshot_every,
        snapshot_ranks={"actor": derived.actor_ranks}
        | {role.name: role.tensor_parallel_size for role in derived.column_roles if role.trained},
        recovery_on_disk=recipe.dcs.recovery_on_disk,
        checkpoint=dcs_pb2.CheckpointPolicy(
            every_steps=recipe.checkpoint.every_steps,
            folder=str(run_dir / "checkpoints"),
            keep=recipe.checkpoint.keep,
            model_folder=str(recipe.model.path),
        )
        if recipe.checkpoint.every_steps
        else None,
    )
