"""Attempts to make the next version: who may begin, push, put and commit. Pure decisions over the line.

| call | allowed |
|---|---|
| BeginVersion v | v is the version after the head, under the newest term; every older attempt dies |
| PushSlices v, a | a is the attempt in progress, or the one that committed the head (its bytes were lost) |
| PutRecoverySnapshot v, a | a is the attempt in progress, or the one that committed v |
| CommitVersion v, a | a is the attempt in progress; its slices are complete; the snapshot gate is open |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dcs.rules.line import POLICY, Line
from relax.dcs.v1 import dcs_pb2
from relax_common.errors import AttemptGone, InvalidInput, Precondition, SnapshotMissing
from relax_common.versions import PolicyVersion

_PER_BOOT_BITS = 32


@dataclass
class Attempts:
    """Attempt numbers never repeat, across restarts of dcs either; `current` is the one in progress."""

    boots: int
    begun: int = 0
    current: int | None = None

    def begin(self, line: Line, model: str, version: PolicyVersion) -> int:
        check_model(model)
        line.check_begin(version)
        self.begun += 1
        self.current = self.boots << _PER_BOOT_BITS | self.begun
        return self.current

    def end(self) -> None:
        self.current = None

    def belongs_to(self, line: Line, version: PolicyVersion, attempt: int) -> bool:
        """Whether pushed slices are for the attempt in progress (True) or for the head again (False)."""
        if attempt == self.current and version.number == line.next_number:
            return True
        if version == line.head and line.commit_of(version).attempt == attempt:
            return False
        raise AttemptGone(f"attempt {attempt} of version {version} is gone; begin again")

    def check_snapshot(self, line: Line, header: dcs_pb2.SnapshotHeader, ranks: dict[str, int]) -> None:
        """A snapshot belongs to the attempt in progress or to a committed version."""
        line.terms.check(header.role, header.term)
        if header.rank >= ranks.get(header.role, 0):
            raise InvalidInput(f"{header.role} rank {header.rank} puts no snapshots in this run")
        version = PolicyVersion.from_proto(header.version)
        committed = line.on_line(version) and line.commit_of(version).attempt == header.attempt
        if header.attempt != self.current and not committed:
            raise AttemptGone(f"attempt {header.attempt} of version {version} is gone")


def check_model(model: str) -> None:
    if model != POLICY:
        raise InvalidInput(f"model {model!r} is not trained in this run; {POLICY!r} is")


@dataclass(frozen=True)
class Gate:
    """What a commit is checked against, in addition to the line. `check_slices` raises Precondition where they are not
    a whole version; `newest_state` is the newest version whose state can be loaded, the version to be committed
    included."""

    check_slices: Callable[[], None]
    newest_state: int
    snapshot_every: int


def check_commit(line: Line, attempts: Attempts, record: dcs_pb2.CommitRecord, gate: Gate) -> None:
    """Raises the error that forbids the commit; changes nothing."""
    version = PolicyVersion.from_proto(record.version)
    if line.terms.check(POLICY, record.term):
        raise Precondition(f"term {record.term} of the actor was never registered")
    line.check_begin(version)
    if attempts.current is None or attempts.current != record.attempt:
        raise AttemptGone(f"attempt {record.attempt} of version {version} is gone; begin again")
    gate.check_slices()
    if version.number - gate.newest_state > gate.snapshot_every:
        raise SnapshotMissing(
            f"version {version} waits for a recovery snapshot: the newest is {gate.newest_state}, snapshot_every = "
            f"{gate.snapshot_every}"
        )
