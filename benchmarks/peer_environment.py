"""A separate environment for a system that is compared with ours."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTALL_SECONDS = 3600.0


def environment(folder: Path, requirements: Sequence[str]) -> Path:
    """Path of its Python. The first call makes it, which takes minutes and the network. Raises SystemExit if pip
    fails."""
    python, done = folder / "bin/python", folder / ".complete"
    if done.exists():
        return python
    named = ", ".join(requirements)
    print(f"installing {named} into {folder} (a few minutes, once)", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=INSTALL_SECONDS)
    constraints = ["-c", ROOT / "deploy/constraints-cpu.txt"]
    words = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *constraints]
    if subprocess.run([*words, *requirements], timeout=INSTALL_SECONDS).returncode:
        raise SystemExit(f"{named} could not be installed into {folder}; pip says why above")
    done.touch()
    return python
