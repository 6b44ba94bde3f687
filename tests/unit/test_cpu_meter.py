"""The CPU seconds that comparisons are made of."""

import subprocess
import sys
import time

from benchmarks.arith.cpu_meter import CpuMeter

# Works for half a second of CPU, and so does what it starts; the words behind name the component.
BUSY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], "", "x"]) if sys.argv[1] else None
while time.process_time() < 0.5: pass
if child: child.wait()
time.sleep(0.3)
"""


def test_a_process_and_what_it_started_are_counted_also_after_their_end() -> None:
    begun = time.time()
    process = subprocess.Popen([sys.executable, "-c", BUSY, BUSY, "dcs"])
    with CpuMeter(process.pid, interval_seconds=0.05) as meter:
        assert process.wait(60) == 0
    used = meter.between(begun, time.time())
    assert used.keys() == {"dcs"}, "the child has no name of its own"
    assert 0.8 < used["dcs"] < 5.0
    assert sum(meter.between(time.time(), time.time()).values()) == 0
