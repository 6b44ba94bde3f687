"""A daemon whose term is over ends with exit code 4, so that systemd does not start it again."""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import grpc
import pytest
from grpc_status import rpc_status

from relax.controller.v1 import controller_pb2, controller_pb2_grpc
from relax.dcs.v1 import dcs_pb2_grpc
from relax_common.errors import StaleTerm, to_status
from relax_common.recipe import Recipe, derive, load_recipe, to_toml
from relax_common.rpc.channels import sync_channel
from relax_common.rpc.serving import EXIT_STALE_TERM
from relax_queue.client import QueueClient
from relaxd.plan.requests import dcs_request, queue_request

RUN = "fenced"


class RunningDaemon(Protocol):
    """What tests/conftest.py starts."""

    address: str
    log: str
    process: subprocess.Popen[bytes]

    def restart(self, **env: str) -> None: ...


StartDaemon = Callable[..., RunningDaemon]


class Controller(controller_pb2_grpc.ControllerServiceServicer):
    """Grants term 1 and `assignment`. If it `fences`, it says at the first heartbeat that the term is over."""

    def __init__(self) -> None:
        self.address = ""
        self.assignment = controller_pb2.Assignment()
        self.fences = True

    def Register(
        self, request: controller_pb2.RegisterRequest, context: grpc.ServicerContext
    ) -> controller_pb2.RegisterResponse:
        return controller_pb2.RegisterResponse(
            term=1, ttl_seconds=1.0, controller=request.identity, assignment=self.assignment
        )

    def Heartbeat(
        self, request: controller_pb2.HeartbeatRequest, context: grpc.ServicerContext
    ) -> controller_pb2.HeartbeatResponse:
        if not self.fences:
            return controller_pb2.HeartbeatResponse()
        over = to_status(StaleTerm("term 1 is over, term 2 has registered"))
        context.abort_with_status(rpc_status.to_status(over))
        raise AssertionError("abort raises")


@pytest.fixture
def controller() -> Iterator[Controller]:
    server, controller = grpc.server(ThreadPoolExecutor(2)), Controller()
    controller_pb2_grpc.add_ControllerServiceServicer_to_server(controller, server)
    controller.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield controller
    server.stop(None)


@pytest.fixture
def recipe(quickstart_material: Path) -> Recipe:
    return load_recipe(quickstart_material / "quickstart.toml", ["samples_per_prompt=8"])


def open_run(queue: QueueClient, recipe: Recipe, dcs_address: str) -> None:
    asked = queue_request(RUN, recipe, derive(recipe), dcs_address)
    queue.open_run(asked.spec, asked.recipe_digest, asked.dcs_address)


def assert_fenced(daemon: RunningDaemon, message: str) -> None:
    end = time.monotonic() + 60
    while daemon.process.poll() is None:
        assert time.monotonic() < end, daemon.log
        time.sleep(0.02)
    assert daemon.process.returncode == EXIT_STALE_TERM, daemon.log
    assert message in daemon.log


@pytest.mark.parametrize("module", ["dcs", "relax_queue"])
def test_I8_a_fenced_daemon_exits_with_code_4(start_daemon: StartDaemon, controller: Controller, module: str) -> None:
    daemon = start_daemon(module, "--controller", controller.address)
    assert_fenced(daemon, "term 1 is over")


@pytest.fixture
def assigned(
    start_daemon: StartDaemon, controller: Controller, recipe: Recipe, tmp_path: Path
) -> Iterator[QueueClient]:
    """The controller assigns a run that is open at a real queue and dcs; yields a client of the queue."""
    queue_daemon, dcs = start_daemon("relax_queue"), start_daemon("dcs")
    queue = QueueClient(queue_daemon.address, RUN)
    open_run(queue, recipe, dcs.address)
    with sync_channel(dcs.address) as channel:
        opening = dcs_request(RUN, recipe, derive(recipe), tmp_path)
        dcs_pb2_grpc.DcsServiceStub(channel).OpenRun(opening, timeout=30)
    controller.assignment = controller_pb2.Assignment(
        run=RUN,
        recipe_toml=to_toml(recipe),
        run_dir=str(tmp_path),
        peers=controller_pb2.Peers(queue=queue_daemon.address, dcs=dcs.address),
    )
    yield queue
    queue.close()


of_one_run = pytest.mark.parametrize(
    ("module", "holder"), [("rollout_server", f"{RUN}.rollout-0"), ("trainer_server", "actor")]
)


@pytest.mark.usefixtures("assigned")
@of_one_run
def test_I8_a_daemon_of_a_run_that_relaxd_has_replaced_exits_with_code_4(
    start_daemon: StartDaemon, controller: Controller, module: str, holder: str
) -> None:
    daemon = start_daemon(module, "--controller", controller.address, "--instance", holder)
    assert_fenced(daemon, "term 1 is over")


@of_one_run
def test_I8_a_daemon_of_a_run_that_the_queue_refuses_exits_with_code_4(
    start_daemon: StartDaemon, controller: Controller, assigned: QueueClient, module: str, holder: str
) -> None:
    controller.fences = False
    assigned.register_term(holder, 2)
    daemon = start_daemon(module, "--controller", controller.address, "--instance", holder)
    assert_fenced(daemon, f"term 1 of {holder} is over, term 2 has registered")


def test_I8_a_relaxd_whose_run_another_one_has_taken_over_exits_with_code_4(
    start_daemon: StartDaemon, recipe: Recipe, tmp_path: Path
) -> None:
    relaxd = start_daemon("relaxd", "--launcher", "none", "--runs-dir", str(tmp_path))
    queue_daemon = start_daemon("relax_queue", "--controller", relaxd.address)
    queue = QueueClient(queue_daemon.address, RUN)
    open_run(queue, recipe, "127.0.0.1:1")
    queue.register_term("relaxd", 2)
    queue.close()
    with sync_channel(relaxd.address) as channel:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        request = controller_pb2.CreateRunRequest(
            request_id=uuid.uuid4().hex, recipe_toml=to_toml(recipe), run_dir=str(tmp_path / RUN)
        )
        stub.CreateRun(request, timeout=30)
    # The run begins once dcs is there too; the first offer of prompts is then refused.
    start_daemon("dcs", "--controller", relaxd.address)
    assert_fenced(relaxd, "term 1 of relaxd is over, term 2 has registered")
    # The run belongs to the other relaxd: it was not marked as failed here. This term is as new as the other one.
    relaxd.restart()
    with sync_channel(relaxd.address) as channel:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        run = stub.GetRun(controller_pb2.GetRunRequest(run=RUN), timeout=30).run
    assert run.state in (controller_pb2.RUN_STATE_STARTING, controller_pb2.RUN_STATE_RUNNING)
