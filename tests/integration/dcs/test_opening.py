"""Opening runs: what is refused leaves nothing behind, and trouble of one run does not touch another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from dcs.client import DcsClient
from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc
from relax_common.errors import InvalidInput, NotFound, Precondition, RelaxError, from_rpc
from relax_common.rpc.channels import sync_channel
from relax_common.versions import PolicyVersion

Stub = dcs_pb2_grpc.DcsServiceStub


def request(run: str, **changes: object) -> dcs_pb2.OpenRunRequest:
    values: dict[str, object] = {
        "run": run,
        "memory_budget_bytes": 1 << 20,
        "snapshot_every": 1,
        "snapshot_ranks": {"actor": 1},
    }
    return dcs_pb2.OpenRunRequest(**(values | changes))  # type: ignore[arg-type]


def checkpoints_in(folder: Path) -> dcs_pb2.CheckpointPolicy:
    return dcs_pb2.CheckpointPolicy(every_steps=2, folder=str(folder), keep=2, model_folder=str(folder.parent))


def refusal(call: Callable[[], object]) -> RelaxError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return from_rpc(caught.value)


def logs(daemon: object) -> list[str]:
    return [path.name for path in (daemon.folder / "state" / "runs").iterdir()]  # type: ignore[attr-defined]


def test_a_refused_OpenRun_leaves_no_run_and_no_file(start_daemon: Callable) -> None:
    daemon = start_daemon("dcs")
    stub = Stub(sync_channel(daemon.address))
    wrong = [
        request(""),
        request("a b"),
        request("../a"),
        request("a\n"),
        request("r", checkpoint=checkpoints_in(Path("/no\0path"))),
        request("r", snapshot_every=0),
        request("r", snapshot_ranks={}),
    ]
    for each in wrong:
        assert isinstance(refusal(lambda each=each: stub.OpenRun(each, timeout=10)), InvalidInput)  # type: ignore[misc]
        assert logs(daemon) == []
    assert isinstance(refusal(lambda: stub.GetHead(dcs_pb2.GetHeadRequest(run="r"), timeout=10)), NotFound)
    for name in ("x" * 100_000, "ü" * 50_000):
        error = refusal(lambda name=name: stub.GetHead(dcs_pb2.GetHeadRequest(run=name), timeout=10))  # type: ignore[misc]
        assert isinstance(error, NotFound), "the error itself, however long the name that it repeats"
    stub.OpenRun(request("r"), timeout=10)
    assert logs(daemon) == ["r.log"]


def test_an_OpenRun_that_failed_is_no_run_when_it_is_repeated(start_daemon: Callable, tmp_path: Path) -> None:
    daemon = start_daemon("dcs")
    stub = Stub(sync_channel(daemon.address))
    (tmp_path / "file").write_text("")
    impossible = request("r", checkpoint=checkpoints_in(tmp_path / "file" / "checkpoints"))
    for _ in range(2):
        error = refusal(lambda: stub.OpenRun(impossible, timeout=10))
        assert isinstance(error, InvalidInput)
        assert "cannot be made" in error.message
    assert logs(daemon) == []
    stub.OpenRun(request("r", checkpoint=checkpoints_in(tmp_path / "checkpoints")), timeout=10)
    daemon.kill()
    daemon.restart()
    Stub(sync_channel(daemon.address)).ListCheckpoints(dcs_pb2.ListCheckpointsRequest(run="r"), timeout=10)


def test_a_checkpoint_folder_that_is_gone_at_the_start_harms_no_run(start_daemon: Callable, tmp_path: Path) -> None:
    daemon = start_daemon("dcs")
    stub = Stub(sync_channel(daemon.address))
    share = tmp_path / "share"
    stub.OpenRun(request("with", checkpoint=checkpoints_in(share / "checkpoints")), timeout=10)
    stub.OpenRun(request("without"), timeout=10)
    daemon.kill()
    (share / "checkpoints").rmdir()
    share.rmdir()
    share.write_text("a file in the place of an unmounted share")
    daemon.restart()
    for run in ("with", "without"):
        assert DcsClient(daemon.address, run).head().head is None
    assert "checkpoint_folder_missing" in daemon.log


def test_a_damaged_log_of_one_run_harms_no_other(start_daemon: Callable) -> None:
    daemon = start_daemon("dcs")
    stub = Stub(sync_channel(daemon.address))
    for run in ("broken", "whole"):
        stub.OpenRun(request(run), timeout=10)
        DcsClient(daemon.address, run).register_term("actor", 1)
    daemon.kill()
    path = daemon.folder / "state" / "runs" / "broken.log"
    data = bytearray(path.read_bytes())
    data[12] ^= 1
    path.write_bytes(data)
    daemon.restart()
    assert DcsClient(daemon.address, "whole").head().head is None
    stub = Stub(sync_channel(daemon.address))
    error = refusal(lambda: stub.GetHead(dcs_pb2.GetHeadRequest(run="broken"), timeout=10))
    assert error.code is grpc.StatusCode.DATA_LOSS


def test_checkpoint_folders_lie_below_the_configured_root(start_daemon: Callable, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    (root / "way-out").symlink_to(tmp_path)
    daemon = start_daemon("dcs", "--runs-dir", str(root))
    stub = Stub(sync_channel(daemon.address))
    for outside in (tmp_path / "elsewhere", root / ".." / "elsewhere", root / "way-out" / "elsewhere", root):
        error = refusal(lambda to=outside: stub.OpenRun(request("r", checkpoint=checkpoints_in(to)), timeout=10))  # type: ignore[misc]
        assert isinstance(error, InvalidInput)
    assert not (tmp_path / "elsewhere").exists()
    stub.OpenRun(request("r", checkpoint=checkpoints_in(root / "r" / "checkpoints")), timeout=10)


def test_term_0_and_names_that_are_none_are_clear_errors(start_daemon: Callable) -> None:
    daemon = start_daemon("dcs")
    stub = Stub(sync_channel(daemon.address))
    stub.OpenRun(request("r"), timeout=10)
    version = PolicyVersion(0, 0).to_proto()
    confirmed = dcs_pb2.ConfirmedRecord(server="rollout-0", term=0, version=version)
    for call in (
        lambda: stub.RegisterTerm(dcs_pb2.RegisterTermRequest(run="r", holder="actor", term=0), timeout=10),
        lambda: stub.RegisterTerm(dcs_pb2.RegisterTermRequest(run="r", holder="", term=1), timeout=10),
        lambda: stub.BeginVersion(dcs_pb2.BeginVersionRequest(run="r", model="actor", version=version), timeout=10),
        lambda: stub.BeginVersion(
            dcs_pb2.BeginVersionRequest(run="r", model="nobody", version=version, term=1), timeout=10
        ),
        lambda: stub.ConfirmServed(dcs_pb2.ConfirmServedRequest(run="r", record=confirmed), timeout=10),
    ):
        error = refusal(call)
        assert isinstance(error, InvalidInput), error
    assert "begun" not in daemon.log


def test_a_revision_that_does_not_exist_is_refused(start_daemon: Callable) -> None:
    daemon = start_daemon("dcs")
    stub = Stub(sync_channel(daemon.address))
    stub.OpenRun(request("r"), timeout=10)
    watch = dcs_pb2.WatchLogRequest(run="r", after_revision=10**9)
    error = refusal(lambda: list(stub.WatchLog(watch, timeout=10)))
    assert isinstance(error, Precondition)
    assert "ends at revision 0" in error.message


def test_what_dcs_keeps_is_for_its_owner_alone(start_daemon: Callable) -> None:
    daemon = start_daemon("dcs")
    stub = Stub(sync_channel(daemon.address))
    stub.OpenRun(request("r"), timeout=10)
    state = daemon.folder / "state"
    for path in (state, *state.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
