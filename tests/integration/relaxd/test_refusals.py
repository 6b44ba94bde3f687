"""What relaxd refuses with one line, before it writes anything, and without harm to later calls."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from relax.common.v1 import common_pb2
from relax.controller.v1 import controller_pb2, controller_pb2_grpc
from relax_common.errors import InvalidInput, NotFound, Precondition, RelaxError, from_rpc
from relax_common.recipe import load_recipe, to_toml
from relax_common.rpc.channels import sync_channel
from relax_common.rpc.registration import make_identity

SECONDS = 20.0
CREATE_SECONDS = 60.0
StartDaemon = Callable[..., Any]


@pytest.fixture
def address(start_daemon: StartDaemon, tmp_path: Path) -> str:
    return str(start_daemon("relaxd", "--launcher", "none", "--runs-dir", str(tmp_path / "runs")).address)


@pytest.fixture
def relaxd(address: str) -> Iterator[controller_pb2_grpc.ControllerServiceStub]:
    with sync_channel(address) as channel:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        yield stub


def refused(call: Callable[[], object]) -> RelaxError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return from_rpc(caught.value)


def test_events_after_a_revision_that_does_not_exist_are_refused_and_relaxd_goes_on(
    relaxd: controller_pb2_grpc.ControllerServiceStub,
) -> None:
    """relaxd once spun in its loop without end and answered nobody."""
    watch = controller_pb2.WatchEventsRequest(after_revision=10**9)
    error = refused(lambda: next(relaxd.WatchEvents(watch, timeout=SECONDS)))
    assert isinstance(error, Precondition)
    assert "revision 1000000000 does not exist" in error.message
    assert not relaxd.ListRuns(controller_pb2.ListRunsRequest(), timeout=SECONDS).runs
    # The newest revision is allowed: the call waits for the next event.
    waiting = relaxd.WatchEvents(controller_pb2.WatchEventsRequest(after_revision=0), timeout=SECONDS)
    register(relaxd, "queue", incarnation="x")
    assert next(waiting).kind == "daemon_registered"
    waiting.cancel()


def register(stub: controller_pb2_grpc.ControllerServiceStub, instance: str, incarnation: str) -> Any:
    identity = make_identity(common_pb2.ROLE_QUEUE, instance, "x")
    identity.incarnation = incarnation
    return stub.Register(controller_pb2.RegisterRequest(identity=identity, address="127.0.0.1:1"), timeout=SECONDS)


@pytest.mark.parametrize(
    ("instance", "incarnation"),
    [("queue", ""), ("", "x"), ("my queue", "x"), ("../queue", "x"), ("q" * 129, "x")],
)
def test_a_daemon_without_a_name_or_an_incarnation_gets_no_term(
    relaxd: controller_pb2_grpc.ControllerServiceStub, instance: str, incarnation: str
) -> None:
    assert isinstance(refused(lambda: register(relaxd, instance, incarnation)), InvalidInput)
    assert len(relaxd.ListDaemons(controller_pb2.ListDaemonsRequest(), timeout=SECONDS).daemons) == 1


@pytest.mark.parametrize("token", ["²", "-1", "x", "1.0", "9" * 5000])
def test_a_page_token_that_relaxd_has_not_given_is_refused(
    relaxd: controller_pb2_grpc.ControllerServiceStub, token: str
) -> None:
    error = refused(lambda: relaxd.ListRuns(controller_pb2.ListRunsRequest(page_token=token), timeout=SECONDS))
    assert isinstance(error, InvalidInput)


@pytest.mark.parametrize(
    "run_dir", ["/", "{root}", "{root}/..", "{root}/../elsewhere", "{root}/my run", "{root}/.hidden"]
)
def test_a_run_directory_lies_below_the_configured_root_and_has_a_name(
    relaxd: controller_pb2_grpc.ControllerServiceStub, run_dir: str, tmp_path: Path, quickstart_material: Path
) -> None:
    root = tmp_path / "runs"
    before = sorted(tmp_path.rglob("recipe.toml"))
    request = controller_pb2.CreateRunRequest(
        request_id=uuid.uuid4().hex,
        recipe_toml=to_toml(load_recipe(quickstart_material / "quickstart.toml")),
        run_dir=run_dir.format(root=root),
    )
    error = refused(lambda: relaxd.CreateRun(request, timeout=CREATE_SECONDS))
    assert isinstance(error, InvalidInput)
    assert "run_dir" in error.message
    assert sorted(tmp_path.rglob("recipe.toml")) == before
    assert not relaxd.ListRuns(controller_pb2.ListRunsRequest(), timeout=SECONDS).runs


def test_stop_and_watch_of_a_run_that_does_not_exist_say_so(
    relaxd: controller_pb2_grpc.ControllerServiceStub, address: str, tmp_path: Path
) -> None:
    error = refused(lambda: relaxd.StopRun(controller_pb2.StopRunRequest(run="nope"), timeout=SECONDS))
    assert isinstance(error, NotFound)
    for command in ("watch", "stop"):
        done = subprocess.run(
            [sys.executable, "-m", "relaxd.ctl.main", "--controller", address, command, "nope"],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.strip() == "relaxctl: no run 'nope'; known: none"
