"""Which small changes of the pure modules does the unit tier notice?

    python tests/mutants/run.py                    every mutant of every module in targets.toml
    python tests/mutants/run.py --sample 40        some of them, the same ones for the same --seed
    python tests/mutants/run.py --module puts      only modules with this in their name

Ends with 1 where fewer than 90 % are noticed. A mutant with which the tests do not end counts as noticed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
from mutate import Mutant, mutants  # noqa: E402

NOTICED_MIN = 0.9
SECONDS_MAX = 180.0
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header", "--tb=no")


@dataclass(frozen=True)
class Trial:
    module: str
    tests: tuple[str, ...]
    mutant: Mutant
    excuse: str

    def is_noticed(self) -> bool:
        command = [sys.executable, str(HERE / "child.py"), self.module, str(self.mutant.number), *PYTEST, *self.tests]
        environment = {**os.environ, "PYTHONPATH": str(HERE), "HYPOTHESIS_MAX_EXAMPLES": "40"}
        try:
            ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=SECONDS_MAX)
        except subprocess.TimeoutExpired:
            return True
        if ended.returncode not in (0, 1, 2):
            raise RuntimeError(f"{self.module}: pytest ended with {ended.returncode}: {ended.stdout.decode()[-2000:]}")
        return ended.returncode != 0

    def told(self) -> str:
        excuse = f"  ({self.excuse})" if self.excuse else ""
        return f"{self.module}:{self.mutant.line}: {self.mutant.before!r} -> {self.mutant.after!r}{excuse}"


def trials(only: str) -> list[Trial]:
    found = []
    for target in tomllib.loads((HERE / "targets.toml").read_text())["target"]:
        excuses = {(e["module"], e["before"], e["after"]): e["reason"] for e in target.get("survivors", [])}
        for module in (m for m in target["modules"] if only in m):
            spec = importlib.util.find_spec(module)
            assert spec is not None
            assert spec.origin is not None
            for mutant in mutants(Path(spec.origin).read_text()):
                excuse = excuses.get((module, mutant.before, mutant.after), "")
                found.append(Trial(module, tuple(target["tests"]), mutant, excuse))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--module", default="", metavar="PART")
    options = parser.parse_args()
    chosen = trials(options.module)
    if options.sample:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    noticed: dict[Trial, bool] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for trial, found in zip(chosen, pool.map(Trial.is_noticed, chosen), strict=True):
            noticed[trial] = found
            if not found:
                print(f"survived: {trial.told()}", flush=True)
            elif len(noticed) % 10 == 0:
                print(f"{len(noticed)} of {len(chosen)} tried", flush=True)
    for module in dict.fromkeys(t.module for t in chosen):
        of_module = [t for t in chosen if t.module == module]
        print(f"{module}: {sum(noticed[t] for t in of_module)} of {len(of_module)} noticed")
    share = sum(noticed.values()) / max(1, len(chosen))
    print(f"{share:.1%} of {len(chosen)} mutants noticed, at least {NOTICED_MIN:.0%} must be")
    return 0 if share >= NOTICED_MIN else 1


if __name__ == "__main__":
    sys.exit(main())
