"""The CPU seconds by which systems are compared."""

import subprocess
import sys
import time

from benchmarks.arith.cpu_meter import CpuMeter

# Works for half a second of CPU, and so does what it starts; both then wait until they are told to end.
BUSY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], "", "x"]) if sys.argv[1] else None
while time.process_time() < 0.5: pass
print("worked", flush=True)
sys.stdin.read()
if child: child.wait()
"""


def test_a_process_and_what_it_started_are_counted_also_after_their_end() -> None:
    command = [sys.executable, "-c", BUSY, BUSY, "dcs"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin
    assert process.stdout
    meter = CpuMeter(process.pid)
    assert [process.stdout.readline() for _ in range(2)] == ["worked\n", "worked\n"]
    assert meter.read()
    worked = time.time()
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert not meter.read(), "it is gone"
    used = meter.readings[-1].cpu_seconds
    assert used.keys() == {"dcs"}, "the child has no name of its own"
    assert 0.9 <= used["dcs"] < 5.0
    assert sum(meter.between(worked, time.time()).values()) == 0
