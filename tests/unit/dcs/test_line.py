"""The commit log's state machine against a model: a linear history with rollbacks."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dcs.rules.line import Ancestry, Line
from dcs.rules.manifest import check_complete, check_slice, manifest_hash
from relax.dcs.v1 import dcs_pb2
from relax_common.errors import AlreadyExists, Precondition, StaleTerm
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


def part(start: tuple[int, ...], extent: tuple[int, ...], name: str = "w") -> dcs_pb2.Slice:
    size = 4
    for n in extent:
        size *= n
    return dcs_pb2.Slice(name=name, full_shape=(4, 6), start=start, extent=extent, dtype="F32", size_bytes=size)


def test_a_grid_of_slices_is_complete_and_its_hash_does_not_depend_on_order() -> None:
    slices = [part((r, c), (2, 3)) for r in (0, 2) for c in (0, 3)]
    for entry in slices:
        check_slice(entry)
    check_complete(slices, {"w": (4, 6)})
    assert manifest_hash(slices) == manifest_hash(slices[::-1])
    assert manifest_hash(slices) != manifest_hash(slices[:3])


def test_gaps_and_overlaps_with_the_right_number_of_elements_are_found() -> None:
    with pytest.raises(Precondition, match="must be there once"):
        check_complete([part((0, 0), (2, 6)), part((1, 0), (2, 6))], None)
    with pytest.raises(Precondition, match="2 parameters were not pushed"):
        check_complete([part((0, 0), (4, 6))], {"w": (4, 6), "v": (1,), "u": (2,)})
