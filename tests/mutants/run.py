"""Which small changes of the pure modules does the unit tier notice?

    python tests/mutants/run.py                    every mutant of every module in targets.toml
    python tests/mutants/run.py --sample 40        some of them, the same ones for the same --seed
    python tests/mutants/run.py --module puts      only modules with this in their name

Each mutant has a process of its own, forked from this one after the large libraries are loaded. A mutant with which
the tests do not end counts as noticed; processor time is measured, so that a busy machine changes nothing. Ends with 1
where a target has fewer than 90 % noticed, or an excuse is wrong.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import random
import resource
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
from mutate import Mutant, mutants  # noqa: E402

NOTICED_MIN = 0.9
SECONDS_MAX = 1800.0
"""For tests that wait for ever without computing."""
CPU_SECONDS_MORE = 10.0
"""Tests that take twice the processor time that they take without a mutant, and this on top, do not end."""
LOADED_BEFORE = ("_hypothesis_pytestplugin", "grpc", "hypothesis.stateful", "numpy", "pydantic", "torch", "xxhash")
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:anyio", "--no-header", "--tb=no")


class Loader(importlib.abc.InspectLoader):
    def __init__(self, path: str, mutant: Mutant) -> None:
        self._path = path
        self._mutant = mutant

    def get_source(self, fullname: str) -> str:
        return Path(self._path).read_text()

    def exec_module(self, module: ModuleType) -> None:
        tree = self._mutant.tree(self.get_source(module.__name__))
        exec(compile(tree, self._path, "exec"), module.__dict__)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the mutant in place of its module."""

    def __init__(self, module: str, mutant: Mutant) -> None:
        self._module = module
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        if found is None or found.origin is None:
            raise ImportError(f"{fullname} has no source")
        return importlib.util.spec_from_file_location(fullname, found.origin, loader=Loader(found.origin, self._mutant))


@dataclass(frozen=True)
class Trial:
    """`mutant` is None where the tests are tried without any."""

    target: int
    module: str
    tests: tuple[str, ...]
    mutant: Mutant | None
    excuse: str = ""

    def __str__(self) -> str:
        mutant = self.mutant
        if mutant is None:
            return f"{self.module}, as it is"
        where = f"{self.module}:{mutant.line} {mutant.function}"
        return f"{where}: {mutant.before!r} -> {mutant.after!r}" + (f"  ({self.excuse})" if self.excuse else "")

    def run(self, cpu_seconds_max: int) -> None:
        """In a process of its own; its exit status is that of pytest."""
        if self.mutant is not None:
            sys.meta_path.insert(0, Finder(self.module, self.mutant))
        if cpu_seconds_max:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds_max, cpu_seconds_max))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        sys.exit(pytest.main([*PYTEST, *self.tests]))


@dataclass(frozen=True)
class Tried:
    trial: Trial
    noticed: bool
    seconds: float


def source_of(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return spec.origin


def trials(only: str) -> list[Trial]:
    """The trials of the chosen modules; of each target the first is without a mutant."""
    found: list[Trial] = []
    for number, target in enumerate(tomllib.loads((HERE / "targets.toml").read_text())["target"]):
        excuses = {
            (e["module"], e["function"], e["before"], e["after"]): e["reason"] for e in target.get("survivors", [])
        }
        tests = tuple(target["tests"])
        modules = [m for m in target["modules"] if only in m]
        found += [Trial(number, module, tests, None) for module in modules[:1]]
        for module in modules:
            matched = []
            for mutant in mutants(Path(source_of(module)).read_text()):
                key = (module, mutant.function, mutant.before, mutant.after)
                matched += [key] if key in excuses else []
                found.append(Trial(number, module, tests, mutant, excuses.get(key, "")))
            for key in (key for key in excuses if key[0] == module and matched.count(key) != 1):
                raise SystemExit(f"targets.toml: {matched.count(key)} mutants are {key}: an excuse is for one")
    return found


def run_all(chosen: list[Trial], jobs: int) -> Iterator[Tried]:
    """Tries up to `jobs` at a time."""
    for name in LOADED_BEFORE:
        importlib.import_module(name)
    # A collection would look at all that was loaded, in every process again.
    gc.collect()
    gc.freeze()
    fork = multiprocessing.get_context("fork")
    left = chosen[::-1]
    allowed: dict[int, int] = {}
    running: dict[ForkProcess, tuple[Trial, float]] = {}
    while left or running:
        while left and len(running) < jobs:
            if left[-1].mutant is None and running:
                break  # it is measured, so it runs alone
            trial = left.pop()
            before = _cpu_seconds()
            process = fork.Process(target=trial.run, args=(allowed.get(trial.target, 0),))
            process.start()
            if trial.mutant is None:
                process.join()
                allowed[trial.target] = int(2 * (_cpu_seconds() - before) + CPU_SECONDS_MORE)
            running[process] = (trial, time.monotonic())
        wait([process.sentinel for process in running], timeout=1.0)
        for process, (trial, begun) in list(running.items()):
            seconds = time.monotonic() - begun
            if process.is_alive() and seconds <= SECONDS_MAX:
                continue
            process.kill()
            process.join()
            del running[process]
            yield Tried(trial, process.exitcode != 0, seconds)


def _cpu_seconds() -> float:
    """Of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def report(results: list[Tried]) -> bool:
    """Prints a line for each module and target; whether all targets are as they should be."""
    good = True
    for target in dict.fromkeys(r.trial.target for r in results):
        of_target = [r for r in results if r.trial.target == target]
        for module in dict.fromkeys(r.trial.module for r in of_target):
            print(f"{module}: {_counts([r for r in of_target if r.trial.module == module])}")
        share = sum(r.noticed for r in of_target) / len(of_target)
        wrong = [r.trial for r in of_target if r.noticed and r.trial.excuse]
        print(f"  {share:.1%} of {len(of_target)} noticed, at least {NOTICED_MIN:.0%} must be")
        for trial in wrong:
            print(f"  excused but noticed: {trial}")
        good = good and share >= NOTICED_MIN and not wrong
    return good


def _counts(results: list[Tried]) -> str:
    excused = sum(bool(r.trial.excuse) for r in results)
    seconds = sum(r.seconds for r in results)
    return f"{sum(r.noticed for r in results)} of {len(results)} noticed, {excused} excused, {seconds:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--module", default="", metavar="PART")
    options = parser.parse_args()
    os.chdir(ROOT)
    chosen = trials(options.module)
    if options.sample:
        whole = [trial for trial in chosen if trial.mutant is None]
        rest = [trial for trial in chosen if trial.mutant is not None]
        chosen = whole + random.Random(options.seed).sample(rest, min(options.sample, len(rest)))
    results = []
    for done, tried in enumerate(run_all(chosen, options.jobs), 1):
        if tried.trial.mutant is None:
            if tried.noticed:
                raise SystemExit(f"{', '.join(tried.trial.tests)} fail without a mutant")
            continue
        results.append(tried)
        if not tried.noticed:
            print(f"survived: {tried.trial}", flush=True)
        if done % 50 == 0:
            print(f"{done} of {len(chosen)} tried", flush=True)
    return 0 if report(results) else 1


if __name__ == "__main__":
    sys.exit(main())
