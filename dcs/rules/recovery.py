"""Where recovery starts: the newest version of the line whose whole state can be loaded, and what must be kept for it.

The recovery point F is looked for in memory (snapshots of all ranks under the attempt that committed the version), in
the recovery copy on dcs's own disk, and in checkpoints. Version 0 needs nothing: it is the base model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from dcs.rules.line import Line
from relax_common.versions import PolicyVersion

SnapshotKey = tuple[int, int, int, str, int]
"""(lineage, number, attempt, role, rank)"""


class Source(Enum):
    MEMORY = "memory"
    COPY = "recovery copy"
    CHECKPOINT = "checkpoint"
    BASE = "base model"


@dataclass(frozen=True)
class RecoveryPoint:
    version: PolicyVersion
    source: Source

    @property
    def in_memory(self) -> bool:
        return self.source is Source.MEMORY


@dataclass(frozen=True)
class States:
    """What can be loaded now. `copy` is the version and attempt of the recovery copy."""

    ranks: Mapping[str, int]
    snapshots: Collection[SnapshotKey]
    copy: tuple[PolicyVersion, int] | None = None
    checkpoints: Collection[PolicyVersion] = ()

    def complete(self, version: PolicyVersion, attempt: int) -> bool:
        """Whether memory holds the snapshots of all ranks."""
        return all(
            (version.lineage, version.number, attempt, role, rank) in self.snapshots
            for role, ranks in self.ranks.items()
            for rank in range(ranks)
        )


def recovery_point(line: Line, states: States) -> RecoveryPoint:
    """Returns F; if the version is in several places, the fastest of them."""
    found = [RecoveryPoint(PolicyVersion(0, 0), Source.BASE)]
    found += [RecoveryPoint(version, Source.CHECKPOINT) for version in states.checkpoints if line.on_line(version)]
    if states.copy is not None and _committed_by(line, *states.copy):
        found.append(RecoveryPoint(states.copy[0], Source.COPY))
    for lineage, number, attempt in {key[:3] for key in states.snapshots}:
        version = PolicyVersion(lineage, number)
        if _committed_by(line, version, attempt) and states.complete(version, attempt):
            found.append(RecoveryPoint(version, Source.MEMORY))
    order = list(Source)
    return max(found, key=lambda point: (point.version.number, -order.index(point.source)))


def on_disk(line: Line, states: States) -> PolicyVersion:
    """The newest version that survives dcs and the actor ending together."""
    return recovery_point(line, States(states.ranks, (), states.copy, states.checkpoints)).version


def superfluous_snapshots(line: Line, states: States, current_attempt: int | None) -> list[SnapshotKey]:
    """Snapshots that may be dropped: all but those of the attempt in progress, of F in memory, and of newer committed
    versions."""
    in_memory = recovery_point(line, States(states.ranks, states.snapshots))
    point = in_memory.version if in_memory.in_memory else None

    def kept(key: SnapshotKey) -> bool:
        version = PolicyVersion(key[0], key[1])
        if key[2] == current_attempt:
            return True
        return _committed_by(line, version, key[2]) and (point is None or key[1] >= point.number)

    return [key for key in states.snapshots if not kept(key)]


def _committed_by(line: Line, version: PolicyVersion, attempt: int) -> bool:
    return line.on_line(version) and line.commit_of(version).attempt == attempt
