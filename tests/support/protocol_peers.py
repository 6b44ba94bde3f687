"""The queue's peers in the step commit, each the smallest model that keeps its side of the contract."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relax_common.versions import PolicyVersion

Groups = tuple[str, ...]


@dataclass
class Commit:
    """A committed version: who made it, from which groups, with which payload."""

    lineage: int
    groups: Groups
    tag: tuple[int, int]
    payload: tuple[str, ...] = ()


@dataclass
class Dcs:
    """The log and what is lost with its memory: the attempt, the head's bytes, and the snapshots {(version, tag):
    content} of each trainable role."""

    line: list[Commit] = field(default_factory=list)
    lineage: int = 0
    term: int = 1
    attempt: tuple[int, int, tuple[int, int]] | None = None
    holds_head: bool = True
    snapshots: dict[str, dict[tuple[int, tuple[int, int]], tuple[Groups, ...]]] = field(
        default_factory=lambda: {"actor": {}}
    )
    records: list[tuple[Any, ...]] = field(default_factory=list)
    frontier: int = 0

    @property
    def head(self) -> int:
        return len(self.line) - 1

    def content(self) -> tuple[Groups, ...]:
        return tuple(c.groups for c in self.line[1:])

    def best(self) -> tuple[int, tuple[Groups, ...]]:
        """Newest version on the line of which every role's state can be loaded; version 0 always can."""
        whole = set.intersection(*(set(held) for held in self.snapshots.values()))
        version, tag = max((key for key in whole if self.on_line(*key)), default=(0, (0, 0)))
        content = self.content()[:version]
        for role, held in self.snapshots.items():
            assert not version or held[version, tag] == content, f"I1: F is not a state of the line: {role}"
        return version, content

    def on_line(self, version: int, tag: tuple[int, int]) -> bool:
        return version <= self.head and self.line[version].tag == tag

    def note_frontier(self) -> None:
        version = self.best()[0]
        if version > self.frontier:
            self.frontier = version
            self.records.append(("snapshot", version))

    def put_snapshot(self, role: str, version: int, tag: tuple[int, int], content: tuple[Groups, ...]) -> None:
        self.snapshots[role][version, tag] = content
        self.note_frontier()


@dataclass
class Actor:
    """pc: boot, load, replay, idle, half, trained, staged, sent, stuck."""

    term: int
    pc: str = "boot"
    lineage: int = 0
    content: tuple[Groups, ...] = ()
    groups: Groups = ()
    digest: str = ""
    tag: tuple[int, int] = (0, 0)
    payload: tuple[str, ...] = ()


@dataclass
class Critic:
    """A second trainable role. pc: load, at, valued, stuck. `content` is that of a committed version throughout."""

    pc: str = "load"
    lineage: int = 0
    content: tuple[Groups, ...] = ()
    generation: int = 0
    payload: tuple[str, ...] = ()
    """Of the plan whose rows it has valued and computed gradients of."""


@dataclass
class Server:
    name: str
    term: int = 1
    serving: PolicyVersion | None = None
    confirmed: tuple[int, PolicyVersion] | None = None
    lease: tuple[str, int, PolicyVersion] | None = None
    missing: tuple[int, ...] = ()
