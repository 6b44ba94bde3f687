"""What a daemon's process keeps of the memory that it has freed."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, threading
from relax_common.process.tuning import keep_freed_pages

def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

def work():
    begun.wait()
    for turn in range(THREADS):
        if turn == numbers[threading.current_thread().name]:
            del [bytes(1000) for _ in range(20_000)][:]  # 20 MB, freed at once
        begun.wait()

THREADS = 8
assert keep_freed_pages()
begun = threading.Barrier(THREADS)
numbers = {str(n): n for n in range(THREADS)}
before = resident_mb()
threads = [threading.Thread(target=work, name=name) for name in numbers]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(resident_mb() - before)
"""


def test_threads_use_the_memory_that_others_have_freed() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert float(done.stdout) < 60, "MB; eight threads need 20 MB each, one after the other"
