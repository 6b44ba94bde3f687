"""What a launcher promises to the supervisor of a role. A new way to start daemons is one class that keeps it.

`tests/support/launcher_conformance.py` says the same as tests.
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
    """Its ranks meet at a torch.distributed store; each incarnation gets an address of its own."""
    host: int = 0
    """Index among the run's hosts. The local launcher starts processes of the first one only."""
    leaves: Path | None = None
    """File that exists once the process has done its work: the only sign where nobody sees its exit code."""


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
        """Until it has ended."""
        ...

    async def stop(self, grace_seconds: float) -> None:
        """Ask it to end, and return when it has or the grace is over; a process of our own is killed then."""
        ...

    async def kill(self) -> None:
        """End it at once, where that is in the launcher's power."""
        ...


class Launcher(Protocol):
    """Starts the processes of roles, or knows who does."""

    @property
    def owns_processes(self) -> bool:
        """Whether it starts what has ended again, and stops what it started. If not, something else does both."""
        ...

    async def launch(self, specs: Sequence[ProcessSpec]) -> Sequence[Process]:
        """All ranks of one role under one incarnation, in the order of `specs`.

        The first call for an instance finds what an earlier relaxd has started, where all of it still runs.
        """
        ...
