"""Tries in a few minutes what Relax needs of a GPU: NCCL, an actor's step in bfloat16, SGLang.

    make gpu-check        or   python tests/gpu/check.py --sglang-python .venv-sglang/bin/python

Each part is a process of its own with a deadline. Exit code 0: all parts passed; 1: one failed; 2: no GPU, nothing
was checked. With --device cpu the same code runs without one, by gloo and on torch's CPU kernels.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

PARTS = Path(__file__).with_name("parts.py")
SUPPORT = Path(__file__).parents[1] / "support"
SECONDS = {"group": 60.0, "actor": 120.0, "engine": 280.0}
EXIT_FAILED, EXIT_NO_GPU = 1, 2


@dataclass(frozen=True)
class Outcome:
    """`result` is "ok", "failed" or "not run"; `words` are the part's last line."""

    part: str
    result: str
    seconds: float
    words: str


def main() -> int:
    args = _arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(f"gpu-check: torch {torch.__version__} sees no GPU; nothing was checked", file=sys.stderr)
        return EXIT_NO_GPU
    console = Console()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        outcomes = [run_part(part, Path(folder), args, console) for part in SECONDS]
    table = Table("part", "result", "seconds", "what was seen")
    for each in outcomes:
        table.add_row(each.part, each.result, f"{each.seconds:.1f}", each.words)
    console.print(table)
    return EXIT_FAILED if any(each.result == "failed" for each in outcomes) else 0


def run_part(part: str, folder: Path, args: argparse.Namespace, console: Console) -> Outcome:
    """Runs a part in its own process, which sees the GPU or none. If it fails, its log is printed."""
    if part == "engine" and not args.sglang_python:
        return Outcome(part, "not run", 0.0, "--sglang-python names no interpreter")
    console.print(f"{part}: at most {SECONDS[part]:.0f} s ...")
    started = time.monotonic()
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {}
    command = [sys.executable, str(PARTS), part, "--folder", str(folder), "--sglang-python", args.sglang_python]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=SECONDS[part],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]),
                "PYTHONWARNINGS": "ignore",
                "OMP_NUM_THREADS": "1",
                **hidden,
            },
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(part, "failed", time.monotonic() - started, "did not end in time")
    seconds = time.monotonic() - started
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
    words = (done.stderr if done.returncode else done.stdout).strip().splitlines() or [f"exit {done.returncode}"]
    return Outcome(part, "failed" if done.returncode else "ok", seconds, words[-1])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sglang-python", default="", help="interpreter of the environment that has SGLang")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
