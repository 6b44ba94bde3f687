"""The real dcs daemon: commit log, versions, snapshots, rollback, kills."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from dcs.client import DcsClient, SliceData
from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc
from relax_common.errors import (
    AlreadyExists,
    DataLoss,
    Exhausted,
    InvalidInput,
    NotFound,
    Precondition,
    StaleTerm,
    from_rpc,
)
from relax_common.rpc.channels import sync_channel
from relax_common.versions import PolicyVersion

RUN = "r"


def open_run(
    address: str,
    budget: int = 1 << 20,
    snapshot_every: int = 1,
    ranks: int = 1,
) -> DcsClient:
    stub = dcs_pb2_grpc.DcsServiceStub(sync_channel(address))
    stub.OpenRun(
        dcs_pb2.OpenRunRequest(
            run=RUN, memory_budget_bytes=budget, snapshot_every=snapshot_every, snapshot_ranks={"actor": ranks}
        ),
        timeout=10,
    )
    client = DcsClient(address, RUN)
    client.register_term("actor", 1)
    return client


def weights(fill: int, name: str = "w") -> list[SliceData]:
    """A [4, 2] parameter in two slices of two rows each."""
    return [SliceData(name, (4, 2), (start, 0), (2, 2), "F32", bytes([fill]) * 16) for start in (0, 2)]


def record(version: PolicyVersion, attempt: int, term: int = 1) -> dcs_pb2.CommitRecord:
    result = dcs_pb2.CommitRecord(version=version.to_proto(), term=term, attempt=attempt)
    if version.number:
        result.step = version.number - 1
        result.groups.append(f"0/{version.number}/0")
    return result


def make_version(client: DcsClient, fill: int, *, term: int = 1, snapshot: bool = True) -> dcs_pb2.CommitRecord:
    version = client.head().next_version()
    attempt = client.begin("actor", version, term)
    client.push(version, attempt, term, weights(fill))
    if snapshot and version.number:
        client.put_snapshot(version, attempt, "actor", 0, term, [b"state %d" % version.number])
    return client.commit(record(version, attempt, term))


def test_a_version_is_pushed_committed_pulled_and_confirmed(start_daemon: Callable) -> None:
    client = open_run(start_daemon("dcs").address)
    make_version(client, 1)
    stored = make_version(client, 2)
    head = client.head()
    assert head.head == PolicyVersion(0, 1)
    assert head.recovery == PolicyVersion(0, 1)
    assert head.recovery_in_memory
    assert [data for _, data in client.pull(head.head)] == [b"\2" * 16, b"\2" * 16]
    assert client.get_snapshot(head.head, "actor", 0) == b"state 1"
    revision = client.confirm("rollout-0", 1, head.head)
    assert client.confirm("rollout-0", 1, head.head) == revision
    kinds = [r.WhichOneof("record") for r in client.watch_log(0, deadline_seconds=1.0)]
    assert kinds == ["commit", "commit", "snapshot", "confirmed"]
    assert client.commit(record(PolicyVersion(0, 1), stored.attempt)) == stored


def test_watchers_are_woken_by_a_commit(start_daemon: Callable) -> None:
    client = open_run(start_daemon("dcs").address)
    seen: list[int] = []
    follower = DcsClient(client._address, RUN)
    thread = threading.Thread(
        target=lambda: seen.extend(
            r.commit.version.number for r in follower.watch_log(0, deadline_seconds=3.0) if r.HasField("commit")
        )
    )
    thread.start()
    make_version(client, 1)
    make_version(client, 2)
    thread.join(10)
    assert seen == [0, 1]


def test_I8_an_old_term_may_not_begin_push_commit_or_snapshot(start_daemon: Callable) -> None:
    client = open_run(start_daemon("dcs").address)
    make_version(client, 1)
    version = PolicyVersion(0, 1)
    attempt = client.begin("actor", version, 1)
    client.push(version, attempt, 1, weights(2))
    client.register_term("actor", 2)
    for call in (
        lambda: client.begin("actor", version, 1),
        lambda: client.push(version, attempt, 1, weights(2)),
        lambda: client.put_snapshot(version, attempt, "actor", 0, 1, [b"s"]),
        lambda: client.commit(record(version, attempt, 1)),
    ):
        with pytest.raises(StaleTerm):
            call()
    assert client.head().head == PolicyVersion(0, 0)


def test_I8_an_actor_frozen_before_its_commit_hears_that_its_term_is_over(start_daemon: Callable) -> None:
    client = open_run(start_daemon("dcs").address)
    make_version(client, 1)
    version = PolicyVersion(0, 1)
    attempt = client.begin("actor", version, 1)
    client.push(version, attempt, 1, weights(2))
    client.register_term("actor", 2)
    successor = make_version(client, 3, term=2)
    with pytest.raises(StaleTerm):
        client.commit(record(version, attempt, 1))
    with pytest.raises(AlreadyExists):
        client.commit(record(version, attempt, 2))
    assert client.commit(record(version, successor.attempt, 2)) == successor


def test_I8_a_term_survives_kill_9(start_daemon: Callable) -> None:
    daemon = start_daemon("dcs")
    client = open_run(daemon.address)
    client.register_term("actor", 7)
    daemon.kill()
    daemon.restart()
    with pytest.raises(StaleTerm):
        client.begin("actor", PolicyVersion(0, 0), 6)


@pytest.mark.parametrize(
    ("slices", "error", "words"),
    [
        ([], Precondition, "no slice"),
        (weights(1)[:1], Precondition, "4 of 8"),
        ([SliceData("w", (4, 2), (3, 0), (2, 2), "F32", bytes(16))], InvalidInput, "exceeds the shape"),
        ([SliceData("w", (4, 2), (0, 0), (4, 2), "F32", bytes(16))], InvalidInput, "needs 32"),
        ([SliceData("w", (4, 2), (0, 0), (4, 2), "F99", bytes(32))], InvalidInput, "unknown dtype"),
        (
            [weights(1)[0], SliceData("w", (4, 2), (1, 0), (2, 2), "F32", bytes(16))],
            Precondition,
            "must be there once",
        ),
    ],
)
def test_incomplete_or_impossible_weights_are_never_committed(
    start_daemon: Callable, slices: list[SliceData], error: type[Exception], words: str
) -> None:
    client = open_run(start_daemon("dcs").address)
    version = PolicyVersion(0, 0)
    attempt = client.begin("actor", version, 1)

    def push_and_commit() -> None:
        if slices:
            client.push(version, attempt, 1, slices)
        client.commit(record(version, attempt))

    with pytest.raises(error, match=words):
        push_and_commit()
    assert client.head().head is None


def test_later_versions_have_the_parameters_of_version_0(start_daemon: Callable) -> None:
    client = open_run(start_daemon("dcs").address)
    make_version(client, 1)
    version = PolicyVersion(0, 1)
    attempt = client.begin("actor", version, 1)
    client.push(version, attempt, 1, weights(2, name="other"))
    with pytest.raises(Precondition, match="no such parameter"):
        client.commit(record(version, attempt))


def test_bytes_that_do_not_match_their_hash_are_refused(start_daemon: Callable) -> None:
    client = open_run(start_daemon("dcs").address)
    version = PolicyVersion(0, 0)
    attempt = client.begin("actor", version, 1)
    entry = weights(1)[0].to_proto()
    entry.hash ^= 1
    header = dcs_pb2.PushHeader(run=RUN, version=version.to_proto(), attempt=attempt, term=1, slices=[entry])
    frames = [dcs_pb2.PushSlicesRequest(header=header), dcs_pb2.PushSlicesRequest(chunk=b"\1" * 16)]
    with pytest.raises(grpc.RpcError) as caught:
        client._stub.PushSlices(iter(frames), timeout=10)
    assert caught.value.code() == grpc.StatusCode.DATA_LOSS


def test_I4_memory_is_refused_above_the_budget_and_not_grown(start_daemon: Callable) -> None:
    client = open_run(start_daemon("dcs").address, budget=120)
    make_version(client, 1)
    make_version(client, 2)
    make_version(client, 3)  # three versions of 32 bytes and two snapshots at most; the oldest went
    version = PolicyVersion(0, 3)
    attempt = client.begin("actor", version, 1)
    with pytest.raises(Exhausted, match="memory_budget_bytes"):
        client.push(version, attempt, 1, [SliceData("w", (8, 2), (0, 0), (8, 2), "F32", bytes(64))])


def test_a_commit_waits_for_an_overdue_snapshot(start_daemon: Callable) -> None:
    client = open_run(start_daemon("dcs").address, snapshot_every=2)
    make_version(client, 1)
    make_version(client, 2, snapshot=False)
    make_version(client, 3, snapshot=True)
    make_version(client, 4, snapshot=False)
    make_version(client, 5, snapshot=False)
    with pytest.raises(Precondition, match="waits for a recovery snapshot"):
        make_version(client, 6, snapshot=False)


def test_a_killed_dcs_keeps_its_log_and_gets_the_heads_bytes_again(start_daemon: Callable) -> None:
    daemon = start_daemon("dcs")
    client = open_run(daemon.address)
    make_version(client, 1)
    stored = make_version(client, 2)
    daemon.kill()
    daemon.restart()
    head = client.head()
    assert head.head == PolicyVersion(0, 1)
    assert not head.holds_head_bytes
    assert head.recovery == PolicyVersion(0, 0)
    with pytest.raises(Precondition, match="does not hold the bytes"):
        client.pull(head.head)
    with pytest.raises(DataLoss, match="differs from what was committed"):
        client.push(head.head, stored.attempt, 1, weights(9))
    client.push(head.head, stored.attempt, 1, weights(2))
    client.put_snapshot(head.head, stored.attempt, "actor", 0, 1, [b"state 1"])
    assert client.head().holds_head_bytes
    assert client.head().recovery == head.head
    assert client.commit(record(head.head, stored.attempt)) == stored
    make_version(client, 3)


def test_an_attempt_that_died_with_dcs_must_be_begun_again(start_daemon: Callable) -> None:
    daemon = start_daemon("dcs")
    client = open_run(daemon.address)
    version = PolicyVersion(0, 0)
    attempt = client.begin("actor", version, 1)
    client.push(version, attempt, 1, weights(1))
    daemon.kill()
    daemon.restart()
    with pytest.raises(NotFound, match="begin again"):
        client.commit(record(version, attempt))
    assert client.begin("actor", version, 1) != attempt


@pytest.mark.parametrize(("point", "stored"), [("dcs.commit_before_append", False), ("dcs.commit_after_fsync", True)])
def test_a_kill_around_the_commit_point_leaves_the_version_committed_or_not_at_all(
    start_daemon: Callable, tmp_path: Path, point: str, stored: bool
) -> None:
    daemon = start_daemon("dcs", RELAX_FAILPOINTS=f"{point}=kill@2", RELAX_FAILPOINTS_DIR=str(tmp_path))
    client = open_run(daemon.address)
    make_version(client, 1)
    version = PolicyVersion(0, 1)
    attempt = client.begin("actor", version, 1)
    client.push(version, attempt, 1, weights(2))
    client.put_snapshot(version, attempt, "actor", 0, 1, [b"state"])
    restarter = threading.Thread(target=lambda: (daemon.process.wait(20), daemon.restart()))
    restarter.start()
    if stored:
        assert client.commit(record(version, attempt)).attempt == attempt
    else:
        with pytest.raises(NotFound, match="begin again"):
            client.commit(record(version, attempt))
    restarter.join(30)
    assert client.head().head == PolicyVersion(0, 1 if stored else 0)


def test_a_torn_log_tail_is_cut_off(start_daemon: Callable) -> None:
    daemon = start_daemon("dcs")
    client = open_run(daemon.address)
    make_version(client, 1)
    make_version(client, 2)
    daemon.kill()
    path = daemon.folder / "state" / "runs" / f"{RUN}.log"
    os.truncate(path, path.stat().st_size - 3)
    daemon.restart()
    assert client.head().head == PolicyVersion(0, 1)
    assert "log_tail_cut" in daemon.log


def test_rollback_ends_the_lineage_at_the_newest_state_and_is_idempotent(start_daemon: Callable) -> None:
    daemon = start_daemon("dcs")
    client = open_run(daemon.address)
    make_version(client, 1)
    make_version(client, 2)
    make_version(client, 3)
    daemon.kill()
    daemon.restart()
    stub = dcs_pb2_grpc.DcsServiceStub(sync_channel(daemon.address))
    request = dcs_pb2.RollbackRequest(run=RUN, lost_head=PolicyVersion(0, 2).to_proto(), reason="test")
    first = stub.Rollback(request, timeout=10)
    assert (first.record.lineage, first.record.head) == (1, 0)
    assert stub.Rollback(request, timeout=10) == first
    head = client.head()
    assert list(head.line) == [PolicyVersion(0, 0)]
    assert head.next_version() == PolicyVersion(1, 1)
    with pytest.raises(Precondition, match="not on the line"):
        client.confirm("rollout-0", 1, PolicyVersion(0, 2))
    make_version(client, 5)
    assert list(client.head().line) == [PolicyVersion(0, 0), PolicyVersion(1, 1)]


def test_a_second_daemon_on_the_same_state_is_refused(start_daemon: Callable) -> None:
    daemon = start_daemon("dcs")
    result = subprocess.run(
        [sys.executable, "-m", "dcs", "--state-dir", str(daemon.folder / "state")],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 2
    assert "is in use by another daemon" in result.stderr.splitlines()[-1]


def test_other_sizes_for_an_open_run_are_refused(start_daemon: Callable) -> None:
    daemon = start_daemon("dcs")
    open_run(daemon.address)
    stub = dcs_pb2_grpc.DcsServiceStub(sync_channel(daemon.address))
    with pytest.raises(grpc.RpcError) as caught:
        stub.OpenRun(
            dcs_pb2.OpenRunRequest(run=RUN, memory_budget_bytes=5, snapshot_every=1, snapshot_ranks={"actor": 1}),
            timeout=10,
        )
    assert isinstance(from_rpc(caught.value), AlreadyExists)
