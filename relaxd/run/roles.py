"""The supervised daemons of one run."""

from __future__ import annotations

import asyncio
from pathlib import Path

from relax.controller.v1 import controller_pb2
from relax_common.recipe import Derived, Recipe
from relaxd.launch.commands import actor_specs, forward_specs, rollout_specs, support_specs
from relaxd.launch.launcher import Launcher
from relaxd.launch.supervisor import OnEvent, Supervisor


class Roles:
    """queue and dcs, the actor, the roles that only compute, the rollout servers."""

    def __init__(
        self, run: str, recipe: Recipe, derived: Derived, run_dir: Path, launcher: Launcher, on_event: OnEvent
    ) -> None:
        logs, export = run_dir / "logs", run_dir / "export"
        self._launcher = launcher
        self.support = [
            Supervisor([spec], launcher, ends_by_itself=False, on_event=on_event) for spec in support_specs(run_dir)
        ]
        actor = actor_specs(run, recipe, derived, logs, export)
        self.actor = Supervisor(actor, launcher, ends_by_itself=True, on_event=on_event)
        # A role that only computes ends when the queue says that the run is over, a rollout server when it is told to.
        self.forward = [
            Supervisor(specs, launcher, ends_by_itself=True, on_event=on_event)
            for specs in forward_specs(run, recipe, derived, logs, export)
        ]
        self.rollout = [
            Supervisor(specs, launcher, ends_by_itself=False, on_event=on_event)
            for specs in rollout_specs(run, recipe, derived, logs)
        ]

    @property
    def all(self) -> list[Supervisor]:
        return [*self.support, self.actor, *self.forward, *self.rollout]

    def progress(self) -> None:
        """A version was committed: reset every role's count of failures in a row."""
        for role in self.all:
            role.progress()

    def heartbeats_stopped(self, daemon: controller_pb2.Daemon) -> None:
        for role in self.all:
            if role.instance == daemon.identity.instance:
                role.heartbeats_stopped(daemon.rank, daemon.identity.incarnation)

    def restarts(self) -> dict[str, int]:
        return {role.instance: role.restarts for role in self.all}

    async def stop(self) -> None:
        """Stop the roles first: an actor or a rollout server that drains still talks to the queue and dcs."""
        await asyncio.gather(*(role.stop() for role in (self.actor, *self.forward, *self.rollout)))
        # A queue and a dcs that something else has started serve other runs too.
        if self._launcher.owns_processes:
            await asyncio.gather(*(role.stop() for role in self.support))

    async def stop_rollout(self) -> None:
        await asyncio.gather(*(role.stop() for role in self.rollout))
