"""The queue daemon killed, frozen and started again: it knows what is in its log."""

import json
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import DeadlineExceeded, Precondition
from relax_common.rpc.portal import portal
from relax_common.storage.framed_log import FramedLog
from relaxd.run.ledger import Ledger


def wait_for(ready: Any, seconds: float = 10.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := ready()):
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.005)
    return value


def faults_of(bench: Any) -> tuple[Ledger, list[str]]:
    ledger = Ledger()
    for e in bench.events():
        event = json.loads(e.detail_json) | {
            "source": "queue",
            "revision": e.revision,
            "kind": e.kind,
            "group": e.group,
        }
        ledger.apply(event)
    return ledger, ledger.faults


def restart(bench: Any, **environment: str) -> None:
    bench.queue.kill()
    bench.queue.start(**environment)
    bench.client.status()  # answered, and repeated by the client, until the log has been read


def test_I1_I7_a_killed_queue_sends_groups_without_payload_back_and_loses_the_plan(own: Any) -> None:
    own.begin(groups=4)
    leases = own.lease(3)
    for lease in leases[:2]:
        own.complete(lease)
    plan = own.client.get_plan("actor", 1, 0, 0, 0)
    own.client.register_term("actor", 3)
    restart(own)
    status = own.client.status()
    assert (status.counts.pending, status.counts.leased, status.counts.ready) == (3, 1, 0)
    assert status.head.number == 0
    with pytest.raises(Precondition) as lost:
        own.client.get_plan("actor", 3, 0, 0, 1, generation=plan.plan.generation)
    assert lost.value.reason == "PLAN_LOST"
    with pytest.raises(Precondition) as stale:
        own.client.get_plan("actor", 2, 0, 0, 0)
    assert stale.value.reason == "STALE_TERM", "terms are durable"
    assert own.complete(leases[2]) == "accepted", "its lease was extended once"
    for lease in own.lease(1):
        own.complete(lease)
    again = own.client.get_plan("actor", 3, 0, 0, 0)
    assert again.plan.generation == plan.plan.generation + 1
    assert faults_of(own)[1] == []


def test_I1_a_commit_wins_over_a_lost_plan_and_a_replay_is_told_that_the_rows_are_gone(own: Any) -> None:
    own.begin(groups=4)
    for lease in own.lease(2):
        own.complete(lease)
    closing = own.client.get_plan("actor", 1, 0, 0, 1).close
    restart(own)
    (lease,) = own.lease(1)
    assert lease.group.group == "g0"
    own.dcs.commit(1, closing.groups, closing.plan_digest)
    wait_for(lambda: own.client.status().counts.trained == 2)
    with pytest.raises(Precondition) as gone:
        own.complete(lease)
    assert gone.value.reason == "LEASE_GONE"
    with pytest.raises(Precondition) as freed:
        own.client.get_plan("actor", 1, 0, 0, 0)
    assert freed.value.reason == "ROWS_FREED"
    ledger, faults = faults_of(own)
    assert faults == []
    assert sorted(ledger.groups_in("trained")) == ["g0", "g1"]


@pytest.mark.parametrize("point", ["queue.before_apply_commit", "queue.after_apply_commit"])
def test_a_queue_killed_around_applying_a_commit_applies_it_once(own: Any, tmp_path: Path, point: str) -> None:
    own.begin(groups=4)
    environment = {"RELAX_FAILPOINTS_DIR": str(tmp_path), "RELAX_FAILPOINTS": f"{point}=kill@1"}
    wait_for(lambda: own.client.status().confirmed)
    restart(own, **environment)
    for lease in own.lease(2):
        own.complete(lease)
    closing = own.client.get_plan("actor", 1, 0, 0, 1).close
    own.dcs.commit(1, closing.groups, closing.plan_digest)
    assert own.queue.wait() == -9
    own.queue.start(**environment)
    wait_for(lambda: own.client.status().counts.trained == 2)
    assert own.client.status().head.number == 1
    ledger, faults = faults_of(own)
    assert (faults, len(ledger.groups_in("trained"))) == ([], 2)


@pytest.mark.parametrize("point", ["queue.before_fsync", "queue.after_put_logged"])
def test_a_put_whose_answer_a_kill_swallowed_is_repeated_without_harm(own: Any, tmp_path: Path, point: str) -> None:
    own.begin(groups=1)
    (lease,) = own.lease()
    wait_for(lambda: own.client.status().counts.leased)
    hit = 2 if point == "queue.before_fsync" else 1  # the first fsync is that of the restart itself
    environment = {"RELAX_FAILPOINTS_DIR": str(tmp_path), "RELAX_FAILPOINTS": f"{point}=kill@{hit}"}
    restart(own, **environment)
    answers: list[str] = []
    thread = Thread(target=lambda: answers.append(own.complete(lease)))
    thread.start()
    assert own.queue.wait() == -9
    own.queue.start(**environment)
    thread.join(20)
    assert answers == ["accepted"]
    assert faults_of(own)[1] == []


def test_a_torn_tail_is_cut_and_a_foreign_log_is_refused(own: Any, tmp_path: Path) -> None:
    own.begin(groups=3)
    wait_for(lambda: own.client.status().confirmed)
    own.queue.kill()
    log = tmp_path / "state" / "runs" / "run" / f"log-{1:020d}"
    whole = log.read_bytes()
    frames = whole.rstrip(b"\0")
    assert len(whole) > len(frames) + 21, "a killed queue leaves zeros ahead"
    log.write_bytes((frames + whole[:21]).ljust(len(whole), b"\0"))
    own.queue.start()
    assert own.client.status().counts.pending == 3
    assert "log_tail_cut" in own.queue.log()
    own.queue.kill()
    foreign = FramedLog(log)
    list(foreign.replay())
    foreign.append(b'{"unix_seconds": 1, "events": [{"kind": "unheard_of"}]}')
    foreign.close()
    own.queue.start()
    assert own.queue.wait() == 1
    assert "is not a transaction of this release" in own.queue.log()


def test_a_rollback_sends_groups_of_the_dead_lineage_round_again(own: Any) -> None:
    own.begin(groups=4)
    for lease in own.lease(2):
        own.complete(lease)
    closing = own.client.get_plan("actor", 1, 0, 0, 1).close
    own.dcs.commit(1, closing.groups, closing.plan_digest)
    own.dcs.confirm("s", 1, 1)
    (lease,) = own.lease(1)
    revision = own.dcs.rollback(lineage=1, head=0)
    wait_for(lambda: own.client.status().counts.rolled_back == 2)
    with pytest.raises(Precondition):
        own.complete(lease, version=1)
    own.client.seal()
    offers = [pb.PromptGroup(group=f"g{i}", position=i, prompt_json="1") for i in range(2)]
    assert own.client.offer_groups(offers, 1, after_dcs_revision=revision - 1) == (0, 2), "an offer from before"
    assert own.client.offer_groups(offers, 1, after_dcs_revision=revision) == (2, 0)
    own.dcs.confirm("s", 1, 0)
    for lease in own.lease(2):
        own.complete(lease)
    answer = own.client.get_plan("actor", 1, 1, 0, 0)
    assert answer.plan.lineage == 1
    assert answer.chunk.groups == ("g0", "g1")
    with pytest.raises(Precondition) as old:
        own.client.get_plan("actor", 1, 0, 0, 0)
    assert old.value.reason == "PLAN_LOST"
    counts = own.client.end()
    assert (counts.returned, counts.trained) == (4, 0)
    assert faults_of(own)[1] == []


def test_a_drained_queue_exits_cleanly_and_goes_on_where_it_stopped(own: Any) -> None:
    own.begin(groups=2)
    wait_for(lambda: own.client.status().confirmed)
    assert own.queue.terminate() == 0
    connection = own.client.aio.connection
    with pytest.raises(DeadlineExceeded, match="GetStatus"):
        portal().call(connection.call(connection.stub.GetStatus, pb.GetStatusRequest(run="run"), 0.3))
    own.queue.start()
    assert own.client.status().counts.pending == 2, "the client repeats a status until the log has been read"
    assert len(own.lease(2)) == 2
