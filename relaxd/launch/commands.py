"""What a run looks like to the other daemons: sizes for the queue and dcs, processes for the launcher. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from relax.dcs.v1 import dcs_pb2
from relax.queue.v1 import queue_pb2
from relax_common.recipe import Derived, Recipe, recipe_digest
from relax_common.recipe.schema import Actor
from relax_common.rows import PRODUCER, Scope, fields_read_by
from relaxd.launch.local import ProcessSpec
from relaxd.plan.devices import Devices, assign_devices, visible_devices

_SCOPES: dict[Scope, queue_pb2.Scope] = {
    "row": queue_pb2.SCOPE_ROW,
    "sample": queue_pb2.SCOPE_SAMPLE,
    "group": queue_pb2.SCOPE_GROUP,
}


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
    trained = {"actor", *(role.name for role in derived.forward_roles if not role.model_path)}
    consumers = [
        queue_pb2.Consumer(
            name=role,
            fields=[field.name for field in fields_read_by(role, derived.roles)],
            needs_version=queue_pb2.NEEDS_VERSION_STEP if role in trained else queue_pb2.NEEDS_VERSION_ANY,
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
        shaper=f"SHAPER_{recipe.actor.shaper.upper()}",
        stale_policy=f"STALE_POLICY_{recipe.stale_policy.upper()}",
        min_valid_samples=recipe.min_valid_samples,
        max_refills_per_step=derived.refills_per_step_max,
        memory_budget_bytes=recipe.queue.memory_budget_bytes,
        lease_ttl_seconds=recipe.queue.lease_ttl_seconds,
        total_steps=recipe.total_steps,
        durability=f"DURABILITY_{recipe.queue.durability.upper()}",
        seed=recipe.seed,
        deterministic=recipe.queue.deterministic,
        closing=f"CLOSING_{recipe.queue.closing.upper()}",
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
        snapshot_ranks={"actor": derived.actor_ranks},
        checkpoint=dcs_pb2.CheckpointPolicy(
            every_steps=recipe.checkpoint.every_steps,
            folder=str(run_dir / "checkpoints"),
            keep=recipe.checkpoint.keep,
            model_folder=str(recipe.model.path),
        )
        if recipe.checkpoint.every_steps
        else None,
    )


def support_specs(log_dir: Path) -> list[ProcessSpec]:
    """queue and dcs: one process each, at a fixed address."""
    return [
        ProcessSpec(instance=name, rank=0, module=module, log_path=log_dir / f"{name}.log", keeps_port=True)
        for name, module in (("dcs", "dcs"), ("queue", "relax_queue"))
    ]


def actor_specs(run: str, recipe: Recipe, derived: Derived, log_dir: Path) -> list[ProcessSpec]:
    """One process per rank."""
    return _trainer_specs(run, "actor", assign_devices(recipe, derived).actor, recipe.actor, log_dir)


def forward_specs(run: str, recipe: Recipe, derived: Derived, log_dir: Path) -> list[list[ProcessSpec]]:
    """The roles that only compute, each restarted alone."""
    assigned = assign_devices(recipe, derived).forward
    return [
        _trainer_specs(run, role.name, devices, recipe.actor, log_dir)
        for role, devices in zip(derived.forward_roles, assigned, strict=True)
    ]


def _trainer_specs(
    run: str, role: str, devices_by_rank: Sequence[Devices], settings: Actor, log_dir: Path
) -> list[ProcessSpec]:
    """The actor's `settings` are those of forward-only roles too."""
    timeout = str(settings.collective_timeout_seconds)
    common = ("--role", role, "--world-size", str(len(devices_by_rank)), "--collective-timeout-seconds", timeout)
    return [
        ProcessSpec(
            instance=f"{run}.{role}",
            rank=rank,
            module="trainer_server",
            log_path=log_dir / f"{role}-{rank}.log",
            args=(*common, "--rank", str(rank)),
            env=_environment(settings.threads_per_rank, devices),
            needs_store=True,
            host=devices[0].host if devices else 0,
        )
        for rank, devices in enumerate(devices_by_rank)
    ]


def rollout_specs(run: str, recipe: Recipe, derived: Derived, log_dir: Path) -> list[list[ProcessSpec]]:
    """One process per rollout server, each restarted alone. Its engine sees the same devices."""
    urls = recipe.rollout.engine_urls
    return [
        [
            ProcessSpec(
                instance=f"{run}.rollout-{index}",
                rank=0,
                module="rollout_server",
                log_path=log_dir / f"rollout-{index}.log",
                args=("--engine-url", urls[index]) if urls else (),
                env=_environment(recipe.rollout.threads, devices),
                host=devices[0].host if devices else 0,
            )
        ]
        for index, devices in enumerate(assign_devices(recipe, derived).rollout)
    ]


def _environment(threads: int, devices: Devices) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **visible_devices(devices)}


def run_of_instance(instance: str) -> str:
    """Run that an instance serves; '' for queue and dcs, which serve many."""
    return instance.rpartition(".")[0]
