"""Services and placement of a run: queue, weight service, checkpoints, and the hosts that they run on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from relax_common.recipe.base import Count, Real, Section


class Queue(Section):
    memory_budget_bytes: Count = 1 << 30
    lease_ttl_seconds: Annotated[Real, Field(gt=0)] = 60.0
    lease_attempts_max: Annotated[int, Field(ge=0)] = 8
    """A group whose lease was lost this many times is dropped as quarantined; 0: never."""
    durability: Literal["metadata", "full"] = "metadata"
    """What survives a restart of the queue: groups, leases and plans, or the payload too."""
    closing: Literal["all", "min_n"] = "all"
    """A step closes with prompts_per_step groups, or with closing_min_prompts once its deadline has passed."""
    closing_min_prompts: Annotated[int, Field(ge=0)] = 0
    """The least number of groups in a step with closing = "min_n"."""
    closing_deadline_seconds: Annotated[Real, Field(ge=0)] = 0.0
    """Time after the commit that opened a step for planning, with closing = "min_n"."""
    deterministic: bool = False
    """Cut the chunks of a step only when it closes, as a function of seed, step, row keys and lengths alone. The
    embedded engine then computes one group at a time, so that the last bits do not depend on which other groups are
    there."""

    @model_validator(mode="after")
    def _closes(self) -> Queue:
        if self.closing == "min_n" and not (self.closing_min_prompts and self.closing_deadline_seconds):
            raise ValueError('closing = "min_n" needs closing_min_prompts and closing_deadline_seconds above 0')
        if self.closing == "all" and (self.closing_min_prompts or self.closing_deadline_seconds):
            raise ValueError('closing_min_prompts and closing_deadline_seconds need closing = "min_n"')
        return self


class Dcs(Section):
    memory_budget_bytes: Count = 4 << 30
    recovery_on_disk: bool = True
    """Keep the newest complete recovery state on the disk of dcs too; it is written while training continues. If dcs
    and the actor end together (a reboot), at most snapshot_every steps are trained again. Without it the run goes back
    to its newest checkpoint, or to its start."""


class Placement(Section):
    """Which GPUs the run's processes get, and how much memory they have."""

    hosts: Count = 1
    gpus_per_host: Annotated[int, Field(ge=0)] = 0
    """GPUs are given to the actor's ranks, to those of forward-only roles, then to the engines of rollout servers, host
    by host; 0: processes are not limited to devices, and device memory is not checked."""
    gpu_memory_bytes: Count = 80_000_000_000
    """Memory of one GPU. A plan that needs more is refused."""


class Checkpoint(Section):
    every_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints on disk, written while training continues; 0: none, and a stopped run cannot be
    resumed."""
    keep: Count = 3
    """How many of the newest checkpoints are kept; pinned ones are kept in addition."""
    failures_max: Count = 3
    """After this many failed saves in a row (a full disk) the run stops. Each recovery snapshot tries again."""
