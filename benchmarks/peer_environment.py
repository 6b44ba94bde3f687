"""An environment of its own for a system that is measured beside ours."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment(folder: Path, requirements: Sequence[str]) -> Path:
    """Its Python; made the first time, which takes minutes and the network. Raises SystemExit where pip fails."""
    python, done = folder / "bin/python", folder / ".complete"
    if done.exists():
        return python
    named = ", ".join(requirements)
    print(f"installing {named} into {folder} (a few minutes, once)", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    constraints = ["-c", ROOT / "deploy/constraints-cpu.txt"]
    words = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *constraints]
    if subprocess.run([*words, *requirements]).returncode:
        raise SystemExit(f"{named} could not be installed into {folder}; pip says why above")
    done.touch()
    return python
