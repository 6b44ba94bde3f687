"""How long a queue takes to come back, by length of the run: python -m benchmarks.queue_recovery [--json FILE]

The state machine, log and snapshots of a run, without network and without an fsync per call: groups are offered,
leased, put, planned, trained and freed, 16 per step. Then the folder is read as a restart reads it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from relax_common.process.telemetry import configure_logging
from relax_common.versions import PolicyVersion
from relax_queue.rows.facts import facts_of_rows, facts_of_samples
from relax_queue.rows.row_keys import keys_of_samples
from relax_queue.rows.spec import RunSpec
from relax_queue.rules import events as ev
from relax_queue.rules import following, leases, lifecycle
from relax_queue.rules.apply import fold, opened
from relax_queue.rules.group import Group
from relax_queue.rules.planning import plan
from relax_queue.rules.puts import PutCommand, put
from relax_queue.rules.transaction import Decision
from relax_queue.storage.journal import Journal
from relax_queue.storage.snapshots import take_image

PROMPTS_PER_STEP = 16
SAMPLES = 16
SPEC = RunSpec(
    fields=(), consumers=(), prompts_per_step=PROMPTS_PER_STEP, samples_per_prompt=SAMPLES, max_staleness=1,
    snapshot_every=1, tokens_per_row_max=4096, tokens_per_microbatch=65536, groups_per_chunk=PROMPTS_PER_STEP,
    data_parallel_size=8, packer="token_budget", stale_policy="wait", min_valid_samples=2, max_refills_per_step=16,
    memory_budget_bytes=1 << 40, lease_ttl_seconds=60.0,
)  # fmt: skip


class RunOnDisk:
    """Writes the transactions of a run to a journal as a daemon would, and snapshots when they are due."""

    def __init__(self, folder: Path) -> None:
        self.journal = Journal(folder)
        list(self.journal.recover()[1])
        first = ev.RunOpened("run", "digest", SPEC, "dcs")
        self.state = opened(first)
        self.journal.append([first])
        self.revision = 0
        self.snapshot_seconds: list[float] = []
        self._follow(following.commit, None, (0, 0), (), "")

    def _do(self, command: Callable[[Decision], Any]) -> Any:
        decision = Decision(self.state)
        result = command(decision)
        if decision.events:
            plan(decision)
            self.journal.append(decision.events)
        if self.journal.wants_snapshot:
            began = time.perf_counter()
            self.journal.write_snapshot(self.journal.rotate(), take_image(self.state))
            self.journal.compact()
            self.snapshot_seconds.append(time.perf_counter() - began)
        return result

    def _follow(self, command: Callable[..., None], *args: Any) -> None:
        self.revision += 1
        self._do(lambda d: command(d, self.revision, *args))

    def step(self, step: int) -> None:
        first = step * PROMPTS_PER_STEP
        prompt = json.dumps("x" * 400)
        prompts = [ev.Prompt(f"0/{i}/0", 0, i, prompt, "42", "{}") for i in range(first, first + PROMPTS_PER_STEP)]
        self._do(lambda d: lifecycle.offer(d, "relaxd", 1, prompts, 0))
        self._follow(following.confirm, "rollout", 1, (0, step))
        for _ in prompts:
            group = self._do(lambda d: leases.grant(d, "rollout", 1))
            assert isinstance(group, Group), group
            self._do(lambda d, g=group: put(d, self._put(g, step)))
        assert self.state.plan is not None
        assert self.state.plan.close is not None
        close = self.state.plan.close
        self._follow(following.commit, step, (0, step + 1), close.groups, close.plan_digest)
        self._follow(following.frontier, step + 1)

    def _put(self, group: Group, step: int) -> PutCommand:
        version = PolicyVersion(0, step).pack()
        lengths = [1000 + s for s in range(SAMPLES)]
        rows = facts_of_rows(keys_of_samples(group.id, range(SAMPLES)), lengths, [{version: 900}] * SAMPLES)
        samples = facts_of_samples(range(SAMPLES), [True] * SAMPLES, [1.0] * SAMPLES)
        digest = f"{group.id}{'0' * 24}"
        return PutCommand("rollout", 1, group.id, group.attempts, rows, samples, ("tokens",), 4096, digest, "ok")


def measure(steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        run = RunOnDisk(Path(folder) / "run")
        for step in range(steps):
            run.step(step)
        events = run.journal.revision
        run.journal.close()
        on_disk = sum(p.stat().st_size for p in (Path(folder) / "run").iterdir())
        began, cpu = time.perf_counter(), time.process_time()
        journal = Journal(Path(folder) / "run")
        base, later = journal.recover()
        state = fold(later, base)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        assert state == run.state
        journal.close()
        return {
            "steps": steps,
            "groups": steps * PROMPTS_PER_STEP,
            "events": events,
            "snapshot_mb": journal.snapshot_bytes / 1e6,
            "log_after_snapshot_mb": journal.log_bytes / 1e6,
            "disk_mb": on_disk / 1e6,
            "recovery_seconds": seconds,
            "of_these_cpu": cpu,
            "snapshot_seconds_max": max(run.snapshot_seconds, default=0.0),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="*", default=[100, 1000, 5000])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    configure_logging("error", "queue-recovery", "")
    results = [measure(steps) for steps in args.steps]
    table = Table(*results[0])
    for result in results:
        table.add_row(*(f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" for value in result.values()))
    Console(width=160).print(table)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
