"""A run without a daemon: short ways to do what its daemons do, one at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest

from relax_common.versions import PolicyVersion
from relax_queue.rows.facts import facts_of_rows, facts_of_samples
from relax_queue.rows.row_keys import keys_of
from relax_queue.rows.spec import RunSpec
from relax_queue.rules import events as ev
from relax_queue.rules import following, leases, lifecycle, reading
from relax_queue.rules.apply import fold, opened
from relax_queue.rules.group import Group, Status
from relax_queue.rules.planning import plan
from relax_queue.rules.puts import PutCommand, put
from relax_queue.rules.state import StepPlan
from relax_queue.rules.transaction import Decision
from relax_queue.storage import snapshots

V0 = PolicyVersion(0, 0)


class Story:
    """A run of groups g0, g1, ... with version 0 committed and served by a and b."""

    def __init__(self, groups: int = 4, **changes: Any) -> None:
        sizes: dict[str, Any] = {
            "prompts_per_step": 1,
            "samples_per_prompt": 2,
            "max_staleness": 1,
            "snapshot_every": 1,
            "tokens_per_row_max": 8,
            "tokens_per_microbatch": 8,
            "groups_per_chunk": 1,
            "data_parallel_size": 1,
            "packer": "token_budget",
            "stale_policy": "wait",
            "min_valid_samples": 2,
            "max_refills_per_step": 1,
            "memory_budget_bytes": 1 << 30,
            "lease_ttl_seconds": 1.0,
        }
        first = ev.RunOpened("run", "digest", RunSpec(fields=(), consumers=(), **(sizes | changes)), "dcs")
        self.state = opened(first)
        self.log = [ev.Transaction(0.0, (first,))]
        self.revision = 0
        self.block: int | None = None
        """What the last put stored."""
        self.prompts = [ev.Prompt(f"g{i}", 0, i, "1", None, "") for i in range(groups)]
        self.do(lambda d: lifecycle.offer(d, "relaxd", 1, self.prompts, 0))
        self.commit(0, ())
        for server in "ab":
            self.confirm(server, V0)

    def do(self, command: Any) -> Any:
        decision = Decision(self.state)
        try:
            return command(decision)
        finally:
            if decision.events:
                plan(decision)
                self.log.append(ev.Transaction(0.0, tuple(decision.events)))

    def record(self, command: Any, *args: Any) -> int:
        self.revision += 1
        self.do(lambda d: command(d, self.revision, *args))
        return self.revision

    def commit(self, number: int, groups: tuple[str, ...], digest: str = "", lineage: int = 0) -> int:
        step = number - 1 if number else None
        return self.record(following.commit, step, (lineage, number), groups, digest)

    def confirm(self, server: str, version: PolicyVersion, term: int = 1) -> None:
        self.record(following.confirm, server, term, (version.lineage, version.number))

    def lease(self, server: str = "a", term: int = 1) -> Any:
        return self.do(lambda d: leases.grant(d, server, term))

    def put(self, group: Group, version: PolicyVersion = V0, outcome: Any = "ok", **more: Any) -> str:
        samples = more.pop("samples", (0, 1))
        valid = more.pop("valid", True)
        tokens = {v.pack(): n for v, n in more.pop("tokens", {version: 2}).items()}
        segments = more.pop("segments", 1)
        keys = keys_of((group.id, sample, segment) for sample in samples for segment in range(segments))
        rows = facts_of_rows(keys, [4] * len(keys), [tokens] * len(keys))
        facts = facts_of_samples(samples, [valid] * len(samples), [1.0 if valid else math.nan] * len(samples))
        digest = f"{group.id} {group.attempts} {samples} {version}"
        n_bytes, fields = more.pop("n_bytes", 9), more.pop("fields", ())
        command = PutCommand(
            group.server, group.term, group.id, group.attempts, rows, facts, fields, n_bytes, digest, outcome, **more
        )
        disposition, self.block = self.do(lambda d: put(d, command))
        return str(disposition)

    def make(self, version: PolicyVersion = V0, server: str = "a") -> Group:
        """Lease the first pending group and complete it."""
        group = self.lease(server)
        assert isinstance(group, Group), group
        assert self.put(group, version) == "accepted"
        return group

    def crash(self, kept_blocks: Any = None) -> None:
        recovered = fold(self.log)
        assert recovered == self.state, "the state is the fold of its log"
        self.state = snapshots.load(snapshots.dump(snapshots.take_image(recovered)))
        assert self.state == recovered, "a snapshot is the state"
        self.do(lambda d: lifecycle.restart(d, kept_blocks))

    def plan_of(self, step: int) -> StepPlan | None:
        answer = reading.find_plan(self.state, self.state.lineage, step, 99, 0)
        return None if answer is None else answer.plan

    def digest(self) -> str:
        assert self.state.plan is not None
        assert self.state.plan.close is not None
        return self.state.plan.close.plan_digest

    def status(self, group: str) -> Status:
        status = self.state.status_of(group)
        assert status is not None
        return status


@pytest.fixture
def new_story() -> type[Story]:
    return Story
