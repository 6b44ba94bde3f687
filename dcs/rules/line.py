"""The line of versions: which are committed, who may write, what recovery may start from. A fold over durable records.

| record | effect |
|---|---|
| COMMIT v | v becomes the head of the line; v = head + 1 (0 without a head) under the current lineage |
| CONFIRMED | becomes the newest confirmation of its server |
| SNAPSHOT v | v is announced as F: the queue frees the rows of the steps before it |
| CHECKPOINT v | v can be loaded from a checkpoint |
| ROLLBACK lineage, u | versions above u leave the line; the lineage grows |

A commit record takes kilobytes (group ids, probe, metrics). The line keeps 40 bytes of each version; a whole record
is read from the log by its revision.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from relax.dcs.v1 import dcs_pb2
from relax_common.errors import AlreadyExists, InvalidInput, NotFound, Precondition
from relax_common.terms import Terms
from relax_common.versions import PolicyVersion

POLICY = "actor"
"""The trainable role whose weights are published and committed; its term fences pushes and commits."""


class Committed(NamedTuple):
    """What the line keeps of a commit. `digest` tells whether a repeated record is the same."""

    revision: int
    lineage: int
    attempt: int
    manifest_hash: int
    digest: int


class History:
    """A `Committed` for each version number of the line, packed."""

    def __init__(self) -> None:
        self._packed = array("Q")

    def __len__(self) -> int:
        return len(self._packed) // len(Committed._fields)

    def __getitem__(self, number: int) -> Committed:
        width = len(Committed._fields)
        if not 0 <= number < len(self):
            raise IndexError(number)
        return Committed(*self._packed[number * width : (number + 1) * width])

    def append(self, commit: Committed) -> None:
        self._packed.extend(commit)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, History) and self._packed == other._packed

    def cut(self, count: int) -> None:
        del self._packed[count * len(Committed._fields) :]


@dataclass
class Line:
    """State of one run's log."""

    commits: History = field(default_factory=History)
    starts: list[PolicyVersion] = field(default_factory=list)
    """The first version of each lineage on the line, oldest first."""
    lineage: int = 0
    terms: Terms = field(default_factory=Terms)
    confirmed: dict[str, tuple[int, dcs_pb2.ConfirmedRecord]] = field(default_factory=dict)
    """Newest confirmation, with its revision, by server."""
    rollback: tuple[int, PolicyVersion, dcs_pb2.RollbackRecord] | None = None
    """Newest rollback: revision, the head it ended, the record."""
    announced: PolicyVersion | None = None
    """The newest F that a SNAPSHOT record announced."""
    checkpoints: set[PolicyVersion] = field(default_factory=set)
    revision: int = 0

    @property
    def head(self) -> PolicyVersion | None:
        number = len(self.commits) - 1
        return PolicyVersion(self.commits[number].lineage, number) if number >= 0 else None

    @property
    def next_number(self) -> int:
        return len(self.commits)

    def on_line(self, version: PolicyVersion) -> bool:
        return version.number < len(self.commits) and self.commits[version.number].lineage == version.lineage

    def commit_of(self, version: PolicyVersion) -> Committed:
        if not self.on_line(version):
            raise NotFound(f"version {version} is not on the line; the head is {self.head}")
        return self.commits[version.number]

    def apply(self, record: dcs_pb2.LogRecord) -> None:
        """Fold one record in; records come in order of revision."""
        self.revision = record.revision
        match record.WhichOneof("record"):
            case "commit":
                self._commit(record.revision, record.commit)
            case "confirmed":
                self.confirmed[record.confirmed.server] = (record.revision, record.confirmed)
            case "snapshot":
                self.announced = PolicyVersion.from_proto(record.snapshot.version)
            case "checkpoint":
                self.checkpoints.add(PolicyVersion.from_proto(record.checkpoint.version))
            case "rollback":
                self._roll_back(record)

    def _commit(self, revision: int, record: dcs_pb2.CommitRecord) -> None:
        version = PolicyVersion.from_proto(record.version)
        if not self.starts or self.starts[-1].lineage != version.lineage:
            self.starts.append(version)
        self.commits.append(
            Committed(revision, version.lineage, record.attempt, record.manifest_hash, digest_of(record))
        )

    def _roll_back(self, record: dcs_pb2.LogRecord) -> None:
        ended = self.head
        if ended is None:
            raise InvalidInput("a rollback without a head")
        self.rollback = (record.revision, ended, record.rollback)
        self.lineage = record.rollback.lineage
        self.announced = None
        keep = record.rollback.head + 1
        self.commits.cut(keep)
        self.starts = [first for first in self.starts if first.number < keep]
        self.checkpoints = {version for version in self.checkpoints if self.on_line(version)}
        self.confirmed = {
            server: (revision, confirmed)
            for server, (revision, confirmed) in self.confirmed.items()
            if self.on_line(PolicyVersion.from_proto(confirmed.version))
        }

    def check_begin(self, version: PolicyVersion) -> None:
        """Only the version after the head, on the current lineage, may be begun."""
        wanted = PolicyVersion(self.lineage, self.next_number)
        if version != wanted:
            raise Precondition(f"version {version} cannot be begun: the next one is {wanted}")

    def stored_commit(self, record: dcs_pb2.CommitRecord) -> int | None:
        """Revision of the same commit stored before; None where this version is not committed yet.

        Raises StaleTerm or AlreadyExists where it was committed with other content.
        """
        number = record.version.number
        if number >= len(self.commits):
            return None
        stored = self.commits[number]
        if digest_of(record) != stored.digest:
            self.terms.check(POLICY, record.term)
            raise AlreadyExists(
                f"version {PolicyVersion.from_proto(record.version)} was committed before, by attempt {stored.attempt}"
            )
        return stored.revision


def digest_of(record: dcs_pb2.CommitRecord) -> int:
    """xxh3-64 over all that the actor says; dcs fills the manifest hash in."""
    said = dcs_pb2.CommitRecord()
    said.CopyFrom(record)
    said.ClearField("manifest_hash")
    return xxhash.xxh3_64_intdigest(said.SerializeToString(deterministic=True))


class Ancestry:
    """The versions from 0 to the head, by number, from the first version of each lineage."""

    def __init__(self, starts: list[PolicyVersion], head: PolicyVersion | None) -> None:
        self._starts = starts
        self._numbers = [first.number for first in starts]
        self._count = 0 if head is None else head.number + 1

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> PolicyVersion:
        if not 0 <= number < self._count:
            raise IndexError(number)
        return PolicyVersion(self._starts[bisect_right(self._numbers, number) - 1].lineage, number)
