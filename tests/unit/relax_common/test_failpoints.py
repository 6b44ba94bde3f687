"""Named crash points."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def failing(points: str, folder: Path, code: str) -> int:
    env = {**os.environ, "RELAX_FAILPOINTS": points, "RELAX_FAILPOINTS_DIR": str(folder)}
    program = f"from relax_common.failpoints import failpoint\n{code}"
    return subprocess.run([sys.executable, "-c", program], env=env, timeout=30, capture_output=True).returncode


def test_a_failpoint_kills_at_its_hit_once_per_run(tmp_path: Path) -> None:
    code = "for i in range(3): failpoint('a.b')"
    assert failing("a.b=kill@4", tmp_path, code) == 0
    assert failing("a.b=kill@3", tmp_path, code) == -signal.SIGKILL
    assert failing("a.b=kill@3", tmp_path, code) == 0
    assert failing("a.b=explode", tmp_path, code) == 1
