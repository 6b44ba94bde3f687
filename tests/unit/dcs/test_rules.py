"""The rules of dcs one by one: what a rollback voids, who may push and put, where recovery starts, what stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dcs.rules.attempts import Attempts, Gate, check_commit
from dcs.rules.line import Line
from dcs.rules.recovery import RecoveryPoint, Source, States, on_disk, recovery_point, superfluous_snapshots
from relax.dcs.v1 import dcs_pb2
from relax_common.errors import AttemptGone, InvalidInput, Precondition, SnapshotMissing, StaleTerm
from relax_common.versions import PolicyVersion

RANKS = {"actor": 2}


def line_of(*attempts: int) -> Line:
    """Version n was committed by attempts[n]; term 1 is the actor's."""
    line = Line()
    line.terms.register("actor", 1)
    for number, attempt in enumerate(attempts):
        commit = dcs_pb2.CommitRecord(version=PolicyVersion(0, number).to_proto(), attempt=attempt, term=1)
        line.apply(dcs_pb2.LogRecord(revision=line.revision + 1, commit=commit))
    return line


def apply(line: Line, **record: object) -> None:
    line.apply(dcs_pb2.LogRecord(revision=line.revision + 1, **record))  # type: ignore[arg-type]


def roll_back(line: Line, head: int) -> None:
    apply(line, rollback=dcs_pb2.RollbackRecord(lineage=line.lineage + 1, head=head))


def keys(number: int, attempt: int, *ranks: int) -> list[tuple[int, int, int, str, int]]:
    return [(0, number, attempt, "actor", rank) for rank in ranks]


def test_a_rollback_voids_confirmations_checkpoints_and_announcements_off_the_line() -> None:
    line = line_of(10, 11, 12)
    for server, number in (("kept", 1), ("void", 2)):
        version = PolicyVersion(0, number).to_proto()
        apply(line, confirmed=dcs_pb2.ConfirmedRecord(server=server, term=1, version=version))
    for number in (1, 2):
        apply(line, checkpoint=dcs_pb2.CheckpointRecord(version=PolicyVersion(0, number).to_proto()))
    apply(line, snapshot=dcs_pb2.SnapshotRecord(version=PolicyVersion(0, 2).to_proto()))
    roll_back(line, 1)
    assert set(line.confirmed) == {"kept"}
    assert line.checkpoints == {PolicyVersion(0, 1)}
    assert line.announced is None
    assert line.head == PolicyVersion(0, 1)


def test_the_next_version_has_the_new_lineage_and_the_old_one_is_off_the_line() -> None:
    line = line_of(10, 11, 12)
    roll_back(line, 1)
    line.check_begin(PolicyVersion(1, 2))
    with pytest.raises(Precondition):
        line.check_begin(PolicyVersion(0, 2))
    assert not line.on_line(PolicyVersion(0, 2))


def test_slices_are_for_the_attempt_in_progress_or_for_the_head_again() -> None:
    line, attempts = line_of(10, 11), Attempts(boots=1)
    begun = attempts.begin(line, "actor", PolicyVersion(0, 2))
    assert attempts.belongs_to(line, PolicyVersion(0, 2), begun)
    assert not attempts.belongs_to(line, PolicyVersion(0, 1), 11)
    for version, attempt in (
        (PolicyVersion(0, 2), begun + 1),
        (PolicyVersion(0, 1), 10),
        (PolicyVersion(0, 0), 10),
        (PolicyVersion(0, 1), begun),
        (PolicyVersion(0, 3), begun),
    ):
        with pytest.raises(AttemptGone):
            attempts.belongs_to(line, version, attempt)
    again = attempts.begin(line, "actor", PolicyVersion(0, 2))
    with pytest.raises(AttemptGone):
        attempts.belongs_to(line, PolicyVersion(0, 2), begun)
    assert Attempts(boots=2).begin(line, "actor", PolicyVersion(0, 2)) not in (begun, again)


def test_an_attempt_is_for_the_next_version_of_the_trained_model_until_it_ends() -> None:
    line, attempts = line_of(10), Attempts(boots=1)
    with pytest.raises(InvalidInput, match="'critic' is not trained in this run; 'actor' is"):
        attempts.begin(line, "critic", PolicyVersion(0, 1))
    with pytest.raises(Precondition):
        attempts.begin(line, "actor", PolicyVersion(0, 2))
    begun = attempts.begin(line, "actor", PolicyVersion(0, 1))
    assert attempts.current == begun
    attempts.end()
    with pytest.raises(AttemptGone):
        attempts.belongs_to(line, PolicyVersion(0, 1), begun)


def snapshot(number: int, attempt: int, **changes: object) -> dcs_pb2.SnapshotHeader:
    values: dict[str, object] = {"role": "actor", "rank": 0, "term": 1}
    version = PolicyVersion(0, number).to_proto()
    return dcs_pb2.SnapshotHeader(version=version, attempt=attempt, **(values | changes))  # type: ignore[arg-type]


def test_states_are_for_the_attempt_in_progress_or_for_a_committed_version() -> None:
    line, attempts = line_of(10, 11), Attempts(boots=1)
    begun = attempts.begin(line, "actor", PolicyVersion(0, 2))
    for accepted in (snapshot(2, begun), snapshot(1, 11), snapshot(0, 10)):
        attempts.check_snapshot(line, accepted, RANKS)
    refused: list[tuple[dcs_pb2.SnapshotHeader, type[Exception]]] = [
        (snapshot(1, 10), AttemptGone),
        (snapshot(2, begun + 1), AttemptGone),
        (snapshot(1, 11, rank=2), InvalidInput),
        (snapshot(1, 11, role="critic"), InvalidInput),
        (snapshot(1, 11, term=0), InvalidInput),
    ]
    for header, error in refused:
        with pytest.raises(error):
            attempts.check_snapshot(line, header, RANKS)
    line.terms.register("actor", 2)
    with pytest.raises(StaleTerm):
        attempts.check_snapshot(line, snapshot(1, 11), RANKS)


def gate(newest_state: int, snapshot_every: int = 1, check: Callable[[], None] = lambda: None) -> Gate:
    return Gate(check, newest_state, snapshot_every)


def test_a_commit_needs_the_term_the_attempt_the_slices_and_a_recent_state() -> None:
    line, attempts = line_of(10, 11), Attempts(boots=1)
    begun = attempts.begin(line, "actor", PolicyVersion(0, 2))

    def record(**changes: object) -> dcs_pb2.CommitRecord:
        values: dict[str, object] = {"version": PolicyVersion(0, 2).to_proto(), "attempt": begun, "term": 1}
        return dcs_pb2.CommitRecord(**(values | changes))  # type: ignore[arg-type]

    check_commit(line, attempts, record(), gate(1))
    check_commit(line, attempts, record(), gate(0, snapshot_every=2))

    def incomplete() -> None:
        raise Precondition("a hole")

    refused: list[tuple[dcs_pb2.CommitRecord, Gate, type[Exception]]] = [
        (record(), gate(0), SnapshotMissing),
        (record(term=2), gate(1), Precondition),
        (record(attempt=begun + 1), gate(1), AttemptGone),
        (record(version=PolicyVersion(0, 3).to_proto()), gate(2), Precondition),
        (record(version=PolicyVersion(1, 2).to_proto()), gate(1), Precondition),
        (record(), gate(1, check=incomplete), Precondition),
    ]
    for wrong, held_against, error in refused:
        with pytest.raises(error):
            check_commit(line, attempts, wrong, held_against)
    attempts.end()
    with pytest.raises(AttemptGone):
        check_commit(line, attempts, record(), gate(1))


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (States(RANKS, []), RecoveryPoint(PolicyVersion(0, 0), Source.BASE)),
        (States(RANKS, keys(2, 12, 0, 1)), RecoveryPoint(PolicyVersion(0, 2), Source.MEMORY)),
        (States(RANKS, keys(2, 12, 0)), RecoveryPoint(PolicyVersion(0, 0), Source.BASE)),
        (States(RANKS, keys(2, 99, 0, 1)), RecoveryPoint(PolicyVersion(0, 0), Source.BASE)),
        (
            States(RANKS, keys(1, 11, 0, 1), copy=(PolicyVersion(0, 2), 12)),
            RecoveryPoint(PolicyVersion(0, 2), Source.COPY),
        ),
        (
            States(RANKS, keys(2, 12, 0, 1), copy=(PolicyVersion(0, 2), 12)),
            RecoveryPoint(PolicyVersion(0, 2), Source.MEMORY),
        ),
        (States(RANKS, [], copy=(PolicyVersion(0, 2), 99)), RecoveryPoint(PolicyVersion(0, 0), Source.BASE)),
        (States(RANKS, [], copy=(PolicyVersion(1, 2), 12)), RecoveryPoint(PolicyVersion(0, 0), Source.BASE)),
        (
            States(RANKS, [], copy=(PolicyVersion(0, 1), 11), checkpoints=[PolicyVersion(0, 2), PolicyVersion(0, 1)]),
            RecoveryPoint(PolicyVersion(0, 2), Source.CHECKPOINT),
        ),
        (States(RANKS, [], checkpoints=[PolicyVersion(0, 9)]), RecoveryPoint(PolicyVersion(0, 0), Source.BASE)),
    ],
)
def test_recovery_starts_at_the_newest_version_whose_whole_state_can_be_loaded(
    states: States, expected: RecoveryPoint
) -> None:
    assert recovery_point(line_of(10, 11, 12), states) == expected


def test_what_survives_the_end_of_dcs_and_actor_is_what_is_on_disk() -> None:
    states = States(RANKS, keys(2, 12, 0, 1), copy=(PolicyVersion(0, 1), 11))
    assert on_disk(line_of(10, 11, 12), states) == PolicyVersion(0, 1)


def test_snapshots_of_the_recovery_point_of_newer_versions_and_of_the_attempt_in_progress_stay() -> None:
    line = line_of(10, 11, 12)
    recovery, newer, begun, older, dead = (
        keys(1, 11, 0, 1),
        keys(2, 12, 0),
        keys(3, 77, 0),
        keys(0, 10, 0, 1),
        keys(2, 55, 1),
    )
    states = States(RANKS, [*recovery, *newer, *begun, *older, *dead])
    assert sorted(superfluous_snapshots(line, states, current_attempt=77)) == sorted([*older, *dead])
    assert set(superfluous_snapshots(line, states, current_attempt=None)) == {*older, *dead, *begun}
