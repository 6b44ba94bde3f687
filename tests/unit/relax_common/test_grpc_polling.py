"""Processes that move payload poll gRPC's sockets in the threads that wait; the installed gRPC knows the setting."""

import os
import subprocess
import sys

import pytest

from relax_common.process.tuning import POLLED_BY_CALLERS, SETTING


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != SETTING} | environment
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("package", ["relax_queue", "dcs", "relaxd", "rollout_server", "trainer_server"])
def test_set_before_grpc_reads_it(package: str) -> None:
    code = f"import os, sys, {package}; print(os.environ['{SETTING}'], 'grpc' in sys.modules)"
    assert _python(code).stdout.split() == [POLLED_BY_CALLERS, "False"]


def test_a_users_own_setting_stays() -> None:
    code = f"import os, relax_queue; print(os.environ['{SETTING}'])"
    assert _python(code, **{SETTING: "-tcp_rcv_lowat"}).stdout.split() == ["-tcp_rcv_lowat"]


def test_grpc_knows_the_setting() -> None:
    code = "import relax_queue.client, grpc; grpc.insecure_channel('127.0.0.1:1').close()"
    known, unknown = _python(code), _python(code, **{SETTING: "no_such_experiment"})
    assert "Unknown experiment" in unknown.stderr  # or the next line would say nothing
    assert "Unknown experiment" not in known.stderr
    assert known.returncode == 0
