"""Every service of every daemon requires the token, except the health check."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from relax.controller.v1 import controller_pb2, controller_pb2_grpc
from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc
from relax.queue.v1 import queue_pb2, queue_pb2_grpc
from relax_common.rpc.channels import sync_channel
from relax_common.rpc.token import call_metadata

StartDaemon = Callable[..., Any]
Ask = Callable[[grpc.Channel, tuple[tuple[str, str], ...]], object]


def _unary(stub: type, method: str, request: object) -> Ask:
    return lambda channel, metadata: getattr(stub(channel), method)(request, timeout=10, metadata=metadata)


def _stream(stub: type, method: str, request: object) -> Ask:
    return lambda channel, metadata: next(getattr(stub(channel), method)(request, timeout=10, metadata=metadata))


def _frames(stub: type, method: str, request: object) -> Ask:
    return lambda channel, metadata: getattr(stub(channel), method)(iter([request]), timeout=10, metadata=metadata)


def _reflection(channel: grpc.Channel, metadata: tuple[tuple[str, str], ...]) -> object:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    return next(stub.ServerReflectionInfo(iter([request]), timeout=10, metadata=metadata))


CONTROLLER, QUEUE, DCS = (
    controller_pb2_grpc.ControllerServiceStub,
    queue_pb2_grpc.QueueServiceStub,
    dcs_pb2_grpc.DcsServiceStub,
)
CALLS = {
    "relaxd": [
        _unary(CONTROLLER, "ListDaemons", controller_pb2.ListDaemonsRequest()),
        _unary(CONTROLLER, "Register", controller_pb2.RegisterRequest()),
        _unary(CONTROLLER, "CreateRun", controller_pb2.CreateRunRequest(validate_only=True)),
        _stream(CONTROLLER, "WatchEvents", controller_pb2.WatchEventsRequest()),
    ],
    "relax_queue": [
        _unary(QUEUE, "GetStatus", queue_pb2.GetStatusRequest()),
        _unary(QUEUE, "RegisterTerm", queue_pb2.RegisterTermRequest(run="r", holder="actor", term=7)),
        _stream(QUEUE, "WatchEvents", queue_pb2.WatchEventsRequest(run="r")),
        _frames(QUEUE, "PutBlob", queue_pb2.PutBlobRequest(chunk=b"x")),
    ],
    "dcs": [
        _unary(DCS, "GetHead", dcs_pb2.GetHeadRequest(run="r")),
        _unary(DCS, "OpenRun", dcs_pb2.OpenRunRequest(run="r")),
        _stream(DCS, "WatchLog", dcs_pb2.WatchLogRequest(run="r")),
    ],
}
WRONG = [(), (("authorization", "Bearer wrong"),), (("authorization", ""),)]


@pytest.mark.parametrize("module", CALLS)
def test_no_method_answers_without_the_token(module: str, start_daemon: StartDaemon) -> None:
    running = start_daemon(module)
    with grpc.insecure_channel(running.address) as channel:
        for ask in (*CALLS[module], _reflection):
            for metadata in WRONG:
                with pytest.raises(grpc.RpcError) as refused:
                    ask(channel, metadata)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert "RELAX_TOKEN_FILE" in refused.value.details()
        assert _reflection(channel, call_metadata()) is not None
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_the_queues_socket_of_the_host_is_behind_the_same_door(start_daemon: StartDaemon) -> None:
    """Every user of the host can connect to an abstract socket."""
    running = start_daemon("relax_queue")
    with sync_channel(running.address) as channel:
        target = QUEUE(channel).Hello(queue_pb2.HelloRequest(), timeout=10).unix_target
    assert target
    with grpc.insecure_channel(target) as channel:
        for ask in (*CALLS["relax_queue"], _reflection):
            for metadata in WRONG:
                with pytest.raises(grpc.RpcError) as refused:
                    ask(channel, metadata)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert _reflection(channel, call_metadata()) is not None


def test_the_factory_of_channels_shows_it(start_daemon: StartDaemon) -> None:
    running = start_daemon("relaxd")
    with sync_channel(running.address) as channel:
        assert CONTROLLER(channel).ListRuns(controller_pb2.ListRunsRequest()) is not None


@pytest.mark.parametrize("module", [*CALLS, "trainer_server", "rollout_server"])
@pytest.mark.parametrize("flag", ["--listen", "--metrics-listen"])
def test_a_listener_beyond_loopback_is_refused_in_one_line(module: str, flag: str, tmp_path: object) -> None:
    command = [sys.executable, "-m", module, flag, "0.0.0.0:0", "--state-dir", f"{tmp_path}/state"]
    if module.endswith("_server"):
        command += ["--controller", "127.0.0.1:1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert len(lines) == 1
    assert "expose_plaintext = true" in lines[0]
