"""Checkpoints of the real dcs daemon: saved while commits go on, whole after kill -9, loaded after a restart."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dcs.client import DcsClient, SliceData
from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc
from relax_common.rpc.channels import sync_channel
from relax_common.storage.checkpoint_folder import find_checkpoints, state_file
from relax_common.versions import PolicyVersion

RUN = "r"


class Run:
    """A run that keeps a checkpoint of every second version."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder / "checkpoints"
        model = folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps({"hidden_size": 2}))
        policy = dcs_pb2.CheckpointPolicy(every_steps=2, folder=str(self.folder), keep=2, model_folder=str(model))
        self.stub = dcs_pb2_grpc.DcsServiceStub(sync_channel(address))
        self.stub.OpenRun(
            dcs_pb2.OpenRunRequest(
                run=RUN,
                memory_budget_bytes=1 << 20,
                snapshot_every=1,
                snapshot_ranks={"actor": 1},
                checkpoint=policy,
            ),
            timeout=10,
        )
        self.client = DcsClient(address, RUN)
        self.client.register_term("actor", 1)

    def make_version(self) -> PolicyVersion:
        client = self.client
        version = client.head().next_version()
        attempt = client.begin("actor", version, 1)
        client.push(version, attempt, 1, self.slices(version.number))
        record = dcs_pb2.CommitRecord(version=version.to_proto(), term=1, attempt=attempt)
        if version.number:
            record.step = version.number - 1
        client.commit(record)
        if version.number:
            client.put_snapshot(version, attempt, "actor", 0, 1, [b"state %d" % version.number])
        return version

    def slices(self, number: int) -> list[SliceData]:
        return [SliceData("w", (2, 2), (0, 0), (2, 2), "F32", bytes([number]) * 16)]

    def checkpoints(self) -> list[int]:
        return [found.version.number for found in find_checkpoints(self.folder) if found.manifest]

    def wait_for_checkpoint(self, number: int) -> None:
        end = time.monotonic() + 20
        while number not in self.checkpoints() or self.listed().saving:
            assert time.monotonic() < end, self.checkpoints()
            time.sleep(0.02)

    def listed(self) -> dcs_pb2.ListCheckpointsResponse:
        response: dcs_pb2.ListCheckpointsResponse = self.stub.ListCheckpoints(
            dcs_pb2.ListCheckpointsRequest(run=RUN), timeout=10
        )
        return response

    def kinds(self) -> list[str]:
        return [str(record.WhichOneof("record")) for record in self.client.watch_log(0, 0.5)]


def test_checkpoints_are_saved_pinned_deleted_and_loaded_after_a_restart(
    tmp_path: Path, start_daemon: Callable
) -> None:
    daemon = start_daemon("dcs")
    run = Run(tmp_path, daemon.address)
    for number in range(7):
        run.make_version()
        if number and number % 2 == 0:
            run.wait_for_checkpoint(number)
    assert run.checkpoints() == [4, 6]
    assert "checkpoint" in run.kinds()
    pin = dcs_pb2.PinCheckpointRequest(run=RUN, version=PolicyVersion(0, 4).to_proto(), pinned=True)
    run.stub.PinCheckpoint(pin, timeout=10)
    run.make_version()
    saved = run.stub.SaveCheckpoint(dcs_pb2.SaveCheckpointRequest(run=RUN), timeout=10)
    assert PolicyVersion.from_proto(saved.version) == PolicyVersion(0, 7)
    assert [(c.version.number, c.pinned) for c in run.listed().checkpoints] == [(4, True), (6, False), (7, False)]
    run.stub.DeleteCheckpoint(dcs_pb2.DeleteCheckpointRequest(run=RUN, version=saved.version), timeout=10)

    run.make_version()
    run.wait_for_checkpoint(8)
    run.make_version()
    daemon.kill()
    daemon.restart()
    head = run.client.head()
    assert head.head == PolicyVersion(0, 9)
    assert (head.recovery, head.recovery_in_memory) == (PolicyVersion(0, 8), False)
    assert run.client.get_snapshot(head.recovery, "actor", 0) == b"state 8"

    # The newest one is damaged: the one before it takes its place, and a rollback goes there.
    path = run.folder / "version-00000008.0" / state_file("actor", 0)
    path.write_bytes(path.read_bytes()[:-1])
    daemon.kill()
    daemon.restart()
    assert run.client.head().recovery == PolicyVersion(0, 6)
    assert "6 of its 7 bytes" in daemon.log
    rollback = dcs_pb2.RollbackRequest(run=RUN, lost_head=PolicyVersion(0, 9).to_proto(), reason="a test")
    assert run.stub.Rollback(rollback, timeout=10).record.head == 6


@pytest.mark.parametrize("point", ["dcs.checkpoint_half_written", "dcs.checkpoint_before_rename"])
def test_killed_while_saving_the_previous_checkpoint_is_intact(
    tmp_path: Path, start_daemon: Callable, point: str
) -> None:
    daemon = start_daemon("dcs", RELAX_FAILPOINTS=f"{point}=kill@2", RELAX_FAILPOINTS_DIR=str(tmp_path))
    run = Run(tmp_path, daemon.address)
    for _ in range(3):
        run.make_version()
    run.wait_for_checkpoint(2)
    run.make_version()
    # The save and the answer run at the same time: dcs may die before the client hears it, which then asks again.
    last = threading.Thread(target=run.make_version)
    last.start()
    assert daemon.process.wait(20) == -9
    assert run.checkpoints() == [2]
    assert [path.name for path in run.folder.glob(".unfinished-*")] == [".unfinished-version-00000004.0"]
    daemon.restart()
    last.join(60)
    assert "unfinished_checkpoint_removed" in daemon.log
    assert run.client.get_snapshot(PolicyVersion(0, 2), "actor", 0) == b"state 2"
    # As an actor does: push the head again and put its state again. Then the missed checkpoint is saved.
    attempt = run.client.head().record.attempt
    run.client.push(PolicyVersion(0, 4), attempt, 1, run.slices(4))
    run.client.put_snapshot(PolicyVersion(0, 4), attempt, "actor", 0, 1, [b"state 4"])
    run.wait_for_checkpoint(4)
    assert run.checkpoints() == [2, 4]
    assert list(run.folder.glob(".unfinished-*")) == []
    assert run.client.head().recovery == PolicyVersion(0, 4)
