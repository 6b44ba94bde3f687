"""The commit log's state: which versions are on the line, terms, F. A fold over fsynced records, pure but in place.

| record | effect |
|---|---|
| COMMIT v | v becomes the head of the line; v = head + 1 (0 without a head) under the current lineage |
| CONFIRMED | newest confirmation of (server) |
| SNAPSHOT, CHECKPOINT v | F = v for the queue (what is loadable from memory is the store's to say) |
| ROLLBACK lineage, u | versions above u leave the line; the lineage grows |
"""

from __future__ import annotations

from dataclasses import dataclass, field

from relax.dcs.v1 import dcs_pb2
from relax_common.errors import AlreadyExists, InvalidInput, NotFound, Precondition, StaleTerm
from relax_common.versions import PolicyVersion

POLICY = "actor"
"""The trainable role whose weights are published and committed; its term fences pushes and commits."""


@dataclass
class Line:
    """State of one run's log."""

    commits: list[dcs_pb2.CommitRecord] = field(default_factory=list)
    """Commit record of version n at index n."""
    commit_revisions: list[int] = field(default_factory=list)
    lineage: int = 0
    terms: dict[str, int] = field(default_factory=dict)
    confirmed: dict[str, tuple[int, dcs_pb2.ConfirmedRecord]] = field(default_factory=dict)
    """Newest confirmation, with its revision, by server."""
    rollback: tuple[int, PolicyVersion, dcs_pb2.RollbackRecord] | None = None
    """Newest rollback: revision, the head it ended, the record."""
    checkpoints: list[PolicyVersion] = field(default_factory=list)
    revision: int = 0

    @property
    def head(self) -> PolicyVersion | None:
        return PolicyVersion.from_proto(self.commits[-1].version) if self.commits else None

    @property
    def next_number(self) -> int:
        return len(self.commits)

    def on_line(self, version: PolicyVersion) -> bool:
        return version.number < len(self.commits) and self.commits[version.number].version.lineage == version.lineage

    def commit_of(self, version: PolicyVersion) -> dcs_pb2.CommitRecord:
        if not self.on_line(version):
            raise NotFound(f"version {version} is not on the line; the head is {self.head}")
        return self.commits[version.number]

    def apply(self, record: dcs_pb2.LogRecord) -> None:
        """Fold one record in; records come in order of revision."""
        self.revision = record.revision
        match record.WhichOneof("record"):
            case "commit":
                self.commits.append(record.commit)
                self.commit_revisions.append(record.revision)
            case "confirmed":
                self.confirmed[record.confirmed.server] = (record.revision, record.confirmed)
            case "checkpoint":
                self.checkpoints.append(PolicyVersion.from_proto(record.checkpoint.version))
            case "rollback":
                self._roll_back(record)

    def apply_term(self, holder: str, term: int) -> None:
        self.terms[holder] = max(term, self.terms.get(holder, 0))

    def _roll_back(self, record: dcs_pb2.LogRecord) -> None:
        ended = self.head
        if ended is None:
            raise InvalidInput("a rollback without a head")
        self.rollback = (record.revision, ended, record.rollback)
        self.lineage = record.rollback.lineage
        keep = record.rollback.head + 1
        del self.commits[keep:], self.commit_revisions[keep:]
        self.checkpoints = [version for version in self.checkpoints if self.on_line(version)]
        self.confirmed = {
            server: (revision, confirmed)
            for server, (revision, confirmed) in self.confirmed.items()
            if self.on_line(PolicyVersion.from_proto(confirmed.version))
        }

    def check_term(self, holder: str, term: int) -> bool:
        """STALE_TERM for an old term; True where the term is newer than known and must be made durable first."""
        known = self.terms.get(holder, 0)
        if term < known:
            raise StaleTerm(f"{holder}: term {term} is over, term {known} has taken over; exit")
        return term > known

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
        same = dcs_pb2.CommitRecord()
        same.CopyFrom(record)
        same.manifest_hash = stored.manifest_hash
        if same != stored:
            self.check_term(POLICY, record.term)
            raise AlreadyExists(
                f"version {PolicyVersion.from_proto(record.version)} was committed before, by attempt {stored.attempt}"
            )
        return self.commit_revisions[number]
