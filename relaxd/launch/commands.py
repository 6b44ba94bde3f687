"""The processes of a run: instance names, commands, environments, devices. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_common.recipe import ColumnRole, Derived, Recipe
from relax_common.recipe.training import Actor
from relaxd.launch.launcher import ProcessSpec
from relaxd.plan.devices import Devices, assign_devices, visible_devices


def support_specs(run_dir: Path) -> list[ProcessSpec]:
    """queue and dcs: one process each, at a fixed address. dcs writes checkpoints below the run's directory only."""
    return [
        ProcessSpec(
            instance=name,
            rank=0,
            module=module,
            log_path=run_dir / "logs" / f"{name}.log",
            args=args,
            keeps_port=True,
        )
        for name, module, args in (("dcs", "dcs", ("--runs-dir", str(run_dir))), ("queue", "relax_queue", ()))
    ]


def actor_specs(run: str, recipe: Recipe, derived: Derived, log_dir: Path, export: Path) -> list[ProcessSpec]:
    """One process per rank. `export` is the folder that the actor writes at the end."""
    return _trainer_specs(run, "actor", assign_devices(recipe, derived).actor, recipe.actor, log_dir, export)


def forward_specs(run: str, recipe: Recipe, derived: Derived, log_dir: Path, export: Path) -> list[list[ProcessSpec]]:
    """The roles beside the actor, each restarted alone. A trained one leaves an export of its own."""
    assigned = assign_devices(recipe, derived).forward
    return [
        _trainer_specs(run, role.name, devices, recipe.actor, log_dir, own_export(export, role))
        for role, devices in zip(derived.column_roles, assigned, strict=True)
    ]


def own_export(export: Path, role: ColumnRole) -> Path:
    return export.with_name(f"{export.name}-{role.name}") if role.trained else export


def _trainer_specs(
    run: str, role: str, devices_by_rank: Sequence[Devices], settings: Actor, log_dir: Path, export: Path
) -> list[ProcessSpec]:
    """`settings` are the actor's; forward-only roles use the same."""
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
            leaves=export / "config.json",
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
    """The run that an instance serves; '' for queue and dcs, which serve many."""
    return instance.rpartition(".")[0]


_HERE = Path()


@dataclass(frozen=True)
class PlannedProcess:
    """`rank` is RANK and `world_size` WORLD_SIZE of its role; `devices` are those of its host."""

    daemon: str
    host: int
    rank: int
    world_size: int
    devices: str


def planned_processes(recipe: Recipe, derived: Derived) -> list[PlannedProcess]:
    roles = [
        *([spec] for spec in support_specs(_HERE)),
        actor_specs("", recipe, derived, _HERE, _HERE),
        *forward_specs("", recipe, derived, _HERE, _HERE),
        *rollout_specs("", recipe, derived, _HERE),
    ]
    return [_planned(spec, len(specs)) for specs in roles for spec in specs]


def _planned(spec: ProcessSpec, world_size: int) -> PlannedProcess:
    devices = spec.env.get("CUDA_VISIBLE_DEVICES", "")
    return PlannedProcess(spec.instance.removeprefix("."), spec.host, spec.rank, world_size, devices)
