"""The processes of a plan, taken from what the launcher is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from relax_common.recipe import Derived, Recipe
from relaxd.launch.commands import actor_specs, forward_specs, rollout_specs, support_specs
from relaxd.launch.local import ProcessSpec

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
    units = [
        *([spec] for spec in support_specs(_HERE)),
        actor_specs("", recipe, derived, _HERE),
        *forward_specs("", recipe, derived, _HERE),
        *rollout_specs("", recipe, derived, _HERE),
    ]
    return [_planned(spec, len(unit)) for unit in units for spec in unit]


def _planned(spec: ProcessSpec, world_size: int) -> PlannedProcess:
    devices = spec.env.get("CUDA_VISIBLE_DEVICES", "")
    return PlannedProcess(spec.instance.removeprefix("."), spec.host, spec.rank, world_size, devices)
