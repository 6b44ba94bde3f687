"""A daemon whose term is over ends with exit code 4, by which systemd knows that it must not start it again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_status import rpc_status

from relax.controller.v1 import controller_pb2, controller_pb2_grpc
from relax_common.errors import StaleTerm, to_status
from relax_common.rpc.serving import EXIT_STALE_TERM


class Controller(controller_pb2_grpc.ControllerServiceServicer):
    """Grants term 1, and says at the first heartbeat that it is over."""

    def Register(
        self, request: controller_pb2.RegisterRequest, context: grpc.ServicerContext
    ) -> controller_pb2.RegisterResponse:
        return controller_pb2.RegisterResponse(term=1, ttl_seconds=1.0, controller=request.identity)

    def Heartbeat(
        self, request: controller_pb2.HeartbeatRequest, context: grpc.ServicerContext
    ) -> controller_pb2.HeartbeatResponse:
        over = to_status(StaleTerm("term 1 is over, term 2 has registered"))
        context.abort_with_status(rpc_status.to_status(over))
        raise AssertionError("abort raises")


@pytest.fixture
def controller() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    controller_pb2_grpc.add_ControllerServiceServicer_to_server(Controller(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.mark.parametrize("module", ["dcs", "relax_queue"])
def test_I8_a_fenced_daemon_exits_with_code_4(
    start_daemon: Callable, controller: str, module: str, tmp_path: Path
) -> None:
    daemon = start_daemon(module, "--controller", controller)
    end = time.monotonic() + 30
    while daemon.process.poll() is None:
        assert time.monotonic() < end, daemon.log
        time.sleep(0.02)
    assert daemon.process.returncode == EXIT_STALE_TERM, daemon.log
    assert "term 1 is over" in daemon.log
