"""The contract between a launcher and the supervisor of a role. A new way to start daemons is one class that keeps it.

`tests/support/launcher_conformance.py` tests it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class ProcessSpec:
    """One process of a role. The launcher adds listen address, incarnation and controller."""

    instance: str
    rank: int
    module: str
    log_path: Path
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    keeps_port: bool = False
    """Peers hold its address, so a restart listens on the same port."""
    needs_store: bool = False
    """Whether its ranks meet at a torch.distributed store; each incarnation gets a new address for it."""
    host: int = 0
    """Index among the run's hosts. The local launcher starts only processes of the first host."""
    leaves: Path | None = None
    """File that exists once the process has done its work: the only sign if nobody can see its exit code."""


class Process(Protocol):
    """One process of an incarnation."""

    @property
    def rank(self) -> int: ...

    @property
    def pid(self) -> int:
        """Process id on this host; 0 where it is not known."""
        ...

    @property
    def incarnation(self) -> str:
        """What it registers with; empty where the launcher has not chosen it."""
        ...

    @property
    def running(self) -> bool: ...

    @property
    def exit_code(self) -> int | None:
        """None while it runs, and where only another process can see the code."""
        ...

    async def wait(self) -> None:
        """Wait until it has ended."""
        ...

    async def stop(self, grace_seconds: float) -> None:
        """Ask it to end; return when it has ended or the grace is over. A process that we started is then killed."""
        ...

    async def kill(self) -> None:
        """Kill it at once, if the launcher can."""
        ...


class Launcher(Protocol):
    """Starts the processes of roles, or knows who does."""

    @property
    def owns_processes(self) -> bool:
        """Whether it restarts processes that have ended and stops those it started. If not, something else does
        both."""
        ...

    async def launch(self, specs: Sequence[ProcessSpec]) -> Sequence[Process]:
        """All ranks of one role under one incarnation, in the order of `specs`.

        The first call for an instance adopts the processes that an earlier relaxd started, if all of them still run.
        """
        ...
