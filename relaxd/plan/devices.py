"""Which process gets which device. The dry run prints this assignment, and the launcher sets it."""

from __future__ import annotations

from dataclasses import dataclass

from relax_common.errors import InvalidInput
from relax_common.recipe import Derived, Recipe


@dataclass(frozen=True, order=True)
class Device:
    """A GPU of one of the run's hosts, both counted from 0."""

    host: int
    index: int


Devices = tuple[Device, ...]


@dataclass(frozen=True)
class Assignment:
    """Devices of the actor's ranks, of forward-only roles by rank, of rollout servers. A process without an entry sees
    all devices of its host."""

    actor: tuple[Devices, ...]
    forward: tuple[tuple[Devices, ...], ...]
    rollout: tuple[Devices, ...]


def visible_devices(devices: Devices) -> dict[str, str]:
    """The environment that limits a process to its devices; empty where none was assigned."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(device.index) for device in devices)} if devices else {}


def assign_devices(recipe: Recipe, derived: Derived) -> Assignment:
    """Assign devices host by host: the actor's ranks, those of forward-only roles, then each rollout server's engine
    (on one host)."""
    free = _Free(recipe)
    engine = recipe.rollout.devices_per_server
    return Assignment(
        actor=tuple(free.take(1, f"rank {rank} of the actor") for rank in range(derived.actor_ranks)),
        forward=tuple(
            tuple(free.take(1, f"rank {rank} of {role.name}") for rank in range(role.tensor_parallel_size))
            for role in derived.column_roles
        ),
        rollout=tuple(free.take(engine, f"rollout server {server}") for server in range(recipe.rollout.servers)),
    )


class _Free:
    """Devices not yet given away."""

    def __init__(self, recipe: Recipe) -> None:
        self._place = recipe.placement
        self._host, self._index = 0, 0

    def take(self, count: int, whom: str) -> Devices:
        place = self._place
        if not place.gpus_per_host or not count:
            return ()
        if self._index + count > place.gpus_per_host:
            self._host, self._index = self._host + 1, 0
        if self._host == place.hosts or count > place.gpus_per_host:
            raise InvalidInput(
                f"placement.hosts = {place.hosts} x placement.gpus_per_host = {place.gpus_per_host} do not leave "
                f"{'a GPU' if count == 1 else f'{count} GPUs'} on one host for {whom}"
            )
        self._index += count
        return tuple(Device(self._host, index) for index in range(self._index - count, self._index))
