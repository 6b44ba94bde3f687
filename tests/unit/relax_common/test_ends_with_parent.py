"""Engines and reward workers end with the server that started them, however it ends."""

import os
import signal
import subprocess
import sys

ENDS = "import os, signal, sys; from relax_common.process.tuning import end_with_parent\n"
CHILD = ENDS + "end_with_parent(int(sys.argv[1])); print(os.getpid(), flush=True); signal.pause()"
PARENT = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}, str(os.getpid())])"


def test_a_child_is_killed_when_its_parent_is() -> None:
    """The child holds the other end of the pipe, so the pipe ends when both processes have ended."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    try:
        parent.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        os.kill(child, signal.SIGKILL)
        raise


def test_a_child_whose_parent_has_ended_before_ends_at_once() -> None:
    ended = subprocess.run([sys.executable, "-c", CHILD, "1"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "process 1, which started this one, has ended already" in ended.stderr


def test_a_parent_may_be_process_1_of_a_container() -> None:
    code = ENDS + "os.getppid = lambda: 1; end_with_parent(1)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
