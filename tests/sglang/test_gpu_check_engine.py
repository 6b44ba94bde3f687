"""The GPU check's engine part, on the CPU: what the actor exported serves in SGLang in bfloat16."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[1] / "gpu/check.py"


@pytest.mark.timeout(500)
def test_sglang_takes_the_bf16_weights_of_the_check_and_generates(engine_python: str) -> None:
    done = subprocess.run(
        [sys.executable, str(CHECK), "--device", "cpu", "--sglang-python", engine_python],
        capture_output=True,
        text=True,
        timeout=480,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("│ engine"))
    assert "sglang 0.5.23 on cpu, probe within 0." in row
