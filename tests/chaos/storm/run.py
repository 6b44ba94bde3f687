"""One long run under everything that happens to daemons: kills, pairs of kills, freezes, a full disk.

    python tests/chaos/storm/run.py --kills 44 --seed 1          make storm
    python tests/chaos/storm/run.py --kills 6 --no-freezes       a short one

The run must end by itself with exit code 0, every group accounted for, no version committed twice, no rollback that
repeats more than `snapshot_every` steps, and no process left. What was done, and when the run went on, is printed. The
full disk is a tmpfs, which only root can mount; without it that part is left out, and the last line says so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_common.recipe import load_recipe
from relaxd.launch.local import pids_with_state_below
from relaxd.run.files import read_lines
from relaxd.run.ledger import audit
from relaxd.run.summary import rollbacks

REPOSITORY = Path(__file__).parents[3]
FREEZE_SECONDS = 20.0
FULL_SECONDS = 20.0
GO_ON_SECONDS = 180.0
END_SECONDS = 900.0
DISK_BYTES = 256 << 20
KILLS = (
    ("relaxd",),
    ("queue",),
    ("dcs",),
    ("actor",),
    ("rollout-0",),
    ("dcs", "actor"),
    ("queue", "rollout-0"),
    ("relaxd", "actor"),
    ("relaxd", "queue", "dcs"),
)


@dataclass
class Victim:
    """The run under attack as seen from outside: its processes and its files."""

    process: subprocess.Popen[bytes]
    runs: Path
    output: Path

    @property
    def run_dir(self) -> Path:
        return next(path for path in self.runs.iterdir() if path.is_dir())

    def commits(self) -> int:
        try:
            return (self.run_dir / "events.jsonl").read_text(errors="replace").count('"kind":"commit"')
        except (FileNotFoundError, StopIteration):
            return 0

    def pid_of(self, name: str) -> int:
        """0 while it does not exist."""
        state = self.run_dir / "state"
        folder = (
            state
            if name == "relaxd"
            else state / "daemons" / (name if name in ("queue", "dcs") else f"{self.run_dir.name}.{name}")
        )
        for pid in pids_with_state_below(folder):
            if name != "relaxd" or _module_of(pid) == "relaxd":
                return pid
        return 0

    def await_commits(self, count: int, why: str) -> float:
        """Waits for this many commits; returns the seconds it took."""
        start = time.monotonic()
        while self.commits() < count:
            if self.process.poll() is not None:
                raise SystemExit(f"the run ended {why}: {self.explain()}")
            if time.monotonic() - start > GO_ON_SECONDS:
                raise SystemExit(f"no new version for {GO_ON_SECONDS:.0f} s {why}: {self.explain()}")
            time.sleep(0.05)
        return time.monotonic() - start

    def explain(self) -> str:
        return self.output.read_text(errors="replace")[-3000:]


def _module_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return words[words.index(b"-m") + 1].decode() if b"-m" in words else ""


def kill(victim: Victim, names: tuple[str, ...], rng: random.Random) -> None:
    """Kills all of `names`, as nearly at once as one process can. It waits until each of them exists."""
    end = time.monotonic() + GO_ON_SECONDS
    pids: list[int] = []
    while not (pids := [pid for pid in map(victim.pid_of, names) if pid]) or len(pids) < len(names):
        if time.monotonic() > end:
            raise SystemExit(f"{', '.join(names)}: not all there after {GO_ON_SECONDS:.0f} s: {victim.explain()}")
        time.sleep(0.05)
    time.sleep(rng.uniform(0.0, 0.4))
    for pid in pids:
        _signal(pid, signal.SIGKILL)


def _signal(pid: int, signum: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


def freeze(victim: Victim, name: str) -> None:
    pid = victim.pid_of(name)
    _signal(pid, signal.SIGSTOP)
    time.sleep(FREEZE_SECONDS)
    _signal(pid, signal.SIGCONT)


def fill_disk(folder: Path) -> None:
    """Fills the disk for a while, then makes room again."""
    balloon = folder / "balloon"
    with balloon.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while file.write(b"\0" * size):
                    continue
    time.sleep(FULL_SECONDS)
    balloon.unlink()


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A tmpfs at `folder`; False where this user may not mount one."""
    folder.mkdir()
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], capture_output=True, timeout=30
        ).returncode
        == 0
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)


def start(folder: Path, runs: Path, steps: int, overrides: list[str]) -> Victim:
    model = folder / "quickstart" / "made"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    make = [sys.executable, str(REPOSITORY / "recipes/quickstart/make_model.py"), str(model)]
    subprocess.run(make, check=True, capture_output=True, timeout=300, env=env)
    shutil.copy(REPOSITORY / "recipes/quickstart.toml", folder / "quickstart.toml")
    settings = [f"total_steps={steps}", "samples_per_prompt=8", "queue.lease_ttl_seconds=10.0", *overrides]
    command = [
        *(sys.executable, "-m", "relaxd.ctl.main", "--runs-dir", str(runs), "run", str(folder / "quickstart.toml")),
        *(word for setting in settings for word in ("--set", setting)),
    ]
    output = folder / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env)
    return Victim(process, runs, output)


def attack(victim: Victim, args: argparse.Namespace, *, disk: bool) -> None:
    rng = random.Random(args.seed)
    deeds: list[tuple[str, Callable[[], None]]] = []
    for number in range(args.kills):
        names = KILLS[number % len(KILLS)]
        deeds.append((f"kill {' + '.join(names)}", lambda names=names: kill(victim, names, rng)))
    rng.shuffle(deeds)
    if not args.no_freezes:
        for name in ("relaxd", "queue", "dcs", "actor", "rollout-0"):
            deeds.append((f"freeze {name} {FREEZE_SECONDS:.0f} s", lambda name=name: freeze(victim, name)))
    if disk:
        deeds.append((f"full disk {FULL_SECONDS:.0f} s", lambda: fill_disk(victim.runs)))
    victim.await_commits(2, "before the first blow")
    for number, (what, deed) in enumerate(deeds, 1):
        deed()
        before = victim.commits()
        seconds = victim.await_commits(before + 2, f"after {what}")
        print(f"{number:>3}/{len(deeds)}  {what:<32} two versions later after {seconds:5.1f} s", flush=True)


def judge(victim: Victim, steps: int, left_out: str) -> int:
    code = victim.process.wait(END_SECONDS)
    recipe = load_recipe(victim.run_dir / "recipe.toml")
    events: list[dict[str, Any]] = list(read_lines(victim.run_dir / "events.jsonl"))
    result = audit(events, ended=True, max_staleness=recipe.max_staleness)
    faults = list(result.faults)
    if code != 0:
        faults.append(f"relaxctl ended with {code}: {victim.explain()}")
    heads = [event for event in events if event["source"] == "queue" and event["kind"] == "head"]
    if not heads or heads[-1]["version"] != steps:
        faults.append(f"the head is {heads[-1] if heads else None}, not {steps}")
    told = rollbacks(events)
    repeated = [int(line.split(" steps are repeated")[0].rpartition(" ")[2]) for line in told]
    faults += [
        f"rollback beyond snapshot_every = {recipe.snapshot_every}: {line}"
        for line, count in zip(told, repeated, strict=True)
        if count > recipe.snapshot_every
    ]
    left = list(pids_with_state_below(victim.run_dir / "state"))
    faults += [f"process {pid} was left behind" for pid in left]
    summary = json.loads((victim.run_dir / "summary.json").read_text())
    print(
        f"{summary['steps']} steps in {summary['wall_seconds']:.0f} s, {result.commits} commits, rollbacks {told}, "
        f"groups rolled back {summary['groups_rolled_back']}, leases lost {summary['leases_lost']}"
    )
    for fault in faults:
        print(f"fault: {fault}")
    print(("no fault" if not faults else f"{len(faults)} faults") + left_out)
    return 1 if faults else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=44)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-freezes", action="store_true")
    parser.add_argument("--no-disk", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the recipe")
    args = parser.parse_args()
    blows = args.kills + (0 if args.no_freezes else 5) + (0 if args.no_disk else 1)
    steps = 2 * blows + args.kills * 6 + 20
    folder = Path(tempfile.mkdtemp(prefix="relax-storm-"))
    with small_disk(folder / "runs") as mounted:
        victim = start(folder, folder / "runs", steps, args.set)
        try:
            attack(victim, args, disk=mounted and not args.no_disk)
            code = judge(
                victim, steps, "" if mounted or args.no_disk else "; the full disk was left out: no right to mount"
            )
        finally:
            if victim.process.poll() is None:
                victim.process.send_signal(signal.SIGTERM)
                victim.process.wait(120)
    shutil.rmtree(folder, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
