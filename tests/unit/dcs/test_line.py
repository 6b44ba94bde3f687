"""The commit log's state machine against a model: a linear history with rollbacks."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dcs.rules.line import Ancestry, Committed, History, Line, digest_of
from relax.dcs.v1 import dcs_pb2
from relax_common.errors import AlreadyExists, InvalidInput, NotFound, Precondition, StaleTerm
from relax_common.versions import PolicyVersion


class LineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.line = Line()
        self.model: list[PolicyVersion] = []
        self.lineage = 0
        self.term = 1
        self.attempt = 0
        self.everything: list[dcs_pb2.LogRecord] = []

    def append(self, record: dcs_pb2.LogRecord) -> None:
        record.revision = self.line.revision + 1
        self.line.apply(record)
        self.everything.append(record)

    @rule()
    def commit(self) -> None:
        version = PolicyVersion(self.lineage, len(self.model))
        self.line.check_begin(version)
        self.attempt += 1
        commit = dcs_pb2.CommitRecord(version=version.to_proto(), term=self.term, attempt=self.attempt)
        assert self.line.stored_commit(commit) is None
        self.append(dcs_pb2.LogRecord(commit=commit))
        assert self.line.stored_commit(commit) == self.line.revision
        self.model.append(version)

    @rule(step=st.integers(0, 3))
    def another_commit_of_a_version_on_the_line_is_refused(self, step: int) -> None:
        if step < len(self.model):
            version = self.model[step]
            other = dcs_pb2.CommitRecord(version=version.to_proto(), term=self.term, attempt=self.attempt + 1000)
            with pytest.raises((AlreadyExists, StaleTerm)):
                self.line.stored_commit(other)
            with pytest.raises(Precondition):
                self.line.check_begin(version)

    @rule(keep=st.integers(0, 5))
    def rollback(self, keep: int) -> None:
        if self.model:
            head = min(keep, len(self.model) - 1)
            self.lineage += 1
            self.append(dcs_pb2.LogRecord(rollback=dcs_pb2.RollbackRecord(lineage=self.lineage, head=head)))
            dead = self.model[head + 1 :]
            del self.model[head + 1 :]
            assert not any(self.line.on_line(version) for version in dead)

    @rule(term=st.integers(1, 5))
    def terms_only_grow(self, term: int) -> None:
        known = self.line.terms.of("actor")
        if term < known:
            with pytest.raises(StaleTerm):
                self.line.terms.check("actor", term)
        else:
            assert self.line.terms.check("actor", term) == (term > known)
            self.line.terms.register("actor", term)

    @invariant()
    def the_line_is_the_models(self) -> None:
        assert [PolicyVersion(self.line.commits[n].lineage, n) for n in range(len(self.line.commits))] == self.model
        assert list(Ancestry(self.line.starts, self.line.head)) == self.model
        assert self.line.head == (self.model[-1] if self.model else None)

    @invariant()
    def replaying_the_log_gives_the_same_state(self) -> None:
        again = Line()
        for record in self.everything:
            again.apply(record)
        again.terms = self.line.terms
        assert again == self.line


TestLine = LineMachine.TestCase
TestLine.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


def committed(*numbers: int, lineage: int = 0) -> list[dcs_pb2.LogRecord]:
    return [
        dcs_pb2.LogRecord(
            revision=10 + n,
            commit=dcs_pb2.CommitRecord(
                version=PolicyVersion(lineage, n).to_proto(), term=1, attempt=20 + n, manifest_hash=30 + n
            ),
        )
        for n in numbers
    ]


def line_after(*records: dcs_pb2.LogRecord) -> Line:
    line = Line()
    line.terms.register("actor", 1)
    for record in records:
        line.apply(record)
    return line


def rollback(lineage: int, head: int, revision: int = 50) -> dcs_pb2.LogRecord:
    return dcs_pb2.LogRecord(revision=revision, rollback=dcs_pb2.RollbackRecord(lineage=lineage, head=head, reason="r"))


def test_what_the_line_keeps_of_a_commit() -> None:
    records = committed(0, 1)
    line = line_after(*records)
    assert line.commit_of(PolicyVersion(0, 1)) == Committed(11, 0, 21, 31, digest_of(records[1].commit))
    assert (line.revision, line.next_number) == (11, 2)
    with pytest.raises(NotFound, match=r"version 0\.2 is not on the line; the head is 0\.1"):
        line.commit_of(PolicyVersion(0, 2))


def test_the_newest_rollback_and_what_it_ended_are_known() -> None:
    line = line_after(*committed(0, 1, 2), rollback(1, 1), *committed(2, lineage=1))
    assert line.lineage == 1
    assert line.rollback is not None
    revision, ended, record = line.rollback
    assert (revision, ended, record.reason) == (50, PolicyVersion(0, 2), "r")
    assert line.starts == [PolicyVersion(0, 0), PolicyVersion(1, 2)]
    line.apply(rollback(2, 1, revision=60))
    assert line.starts == [PolicyVersion(0, 0)], "the first version of lineage 1 is off the line"
    assert line.rollback[:2] == (60, PolicyVersion(1, 2))


def test_a_rollback_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidInput, match="without a head"):
        line_after(rollback(1, 0))


def test_newest_confirmation_announcement_and_checkpoints_are_kept() -> None:
    line = line_after(*committed(0, 1))
    for revision, number in ((12, 0), (13, 1)):
        version = PolicyVersion(0, number).to_proto()
        confirmed = dcs_pb2.ConfirmedRecord(server="s", term=1, version=version)
        line.apply(dcs_pb2.LogRecord(revision=revision, confirmed=confirmed))
        line.apply(dcs_pb2.LogRecord(revision=revision + 10, snapshot=dcs_pb2.SnapshotRecord(version=version)))
        line.apply(dcs_pb2.LogRecord(revision=revision + 20, checkpoint=dcs_pb2.CheckpointRecord(version=version)))
    revision, newest = line.confirmed["s"]
    assert (revision, newest.version.number) == (13, 1)
    assert line.announced == PolicyVersion(0, 1)
    assert line.checkpoints == {PolicyVersion(0, 0), PolicyVersion(0, 1)}


def test_a_repeated_commit_is_the_same_whatever_hash_dcs_filled_in() -> None:
    (record,) = committed(0)
    line = line_after(record)
    said = dcs_pb2.CommitRecord()
    said.CopyFrom(record.commit)
    said.manifest_hash = 0
    assert line.stored_commit(said) == 10
    assert said.manifest_hash == 0, "the caller's record is not touched"


def test_a_commit_with_other_content_names_the_attempt_before_or_the_old_term() -> None:
    line = line_after(*committed(0))
    (other,) = committed(0)
    other.commit.groups.append("g")
    with pytest.raises(AlreadyExists, match=r"version 0\.0 was committed before, by attempt 20"):
        line.stored_commit(other.commit)
    line.terms.register("actor", 2)
    with pytest.raises(StaleTerm):
        line.stored_commit(other.commit)


def test_the_digest_of_a_record_does_not_depend_on_the_order_of_its_metrics() -> None:
    names = [f"metric_{n}" for n in range(200)]
    one, other = (dcs_pb2.CommitRecord(metrics=dict.fromkeys(order, 1.0)) for order in (names, names[::-1]))
    assert digest_of(one) == digest_of(other)


@pytest.mark.parametrize("number", [-1, 2])
def test_versions_are_numbered_from_0_to_the_head(number: int) -> None:
    line = line_after(*committed(0, 1))
    with pytest.raises(IndexError):
        line.commits[number]
    with pytest.raises(IndexError):
        Ancestry(line.starts, line.head)[number]


def test_the_ancestry_of_a_line_without_a_head_is_empty() -> None:
    assert len(Ancestry([], None)) == 0
    assert Line().head is None
    assert not Line().on_line(PolicyVersion(0, 0))


def test_a_log_without_records_is_at_revision_0_of_lineage_0() -> None:
    assert (Line().revision, Line().lineage, Line().next_number) == (0, 0, 0)
    Line().check_begin(PolicyVersion(0, 0))


def test_histories_are_compared_by_what_they_hold() -> None:
    one, other = History(), History()
    one.append(Committed(1, 0, 1, 2, 3))
    assert one != other
    other.append(Committed(1, 0, 1, 2, 3))
    assert one == other
    assert one != [Committed(1, 0, 1, 2, 3)]
