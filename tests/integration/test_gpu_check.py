"""The GPU check on a machine without a GPU: it says so, and its code runs on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

CHECK = Path(__file__).parents[1] / "gpu/check.py"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CHECK), *args],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore", "COLUMNS": "200"},
    )


def test_without_a_gpu_it_says_so_in_one_line_and_checks_nothing() -> None:
    done = run()
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "sees no GPU; nothing was checked" in line


def test_its_parts_do_on_the_cpu_what_they_do_on_a_gpu() -> None:
    done = run("--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split()[1]: line for line in done.stdout.splitlines() if line.startswith("│")}
    assert "gloo on cpu" in rows["group"]
    assert "torch.bfloat16 on cpu, loss" in rows["actor"]
    assert "not run" in rows["engine"]
