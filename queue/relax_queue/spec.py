"""What the broker must know of a run: its schema, its sizes, and what follows from them."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from relax_common.errors import BadSchema, BadSpec, NoWriter, OverBudget, UnknownField
from relax_queue.extent import DTYPES, Form

Scope = Literal["row", "sample", "group"]
Shaper = Literal["sequential", "whole_groups", "length_balanced", "token_budget"]
StalePolicy = Literal["wait", "mask", "regenerate", "drop"]
Closing = Literal["all", "min_n"]
Durability = Literal["metadata", "full"]

TOKENS, LOSS_MASK, VERSIONS = "tokens", "loss_mask", "versions"
REWARD, REWARD_STATUS = "reward", "reward_status"
PRODUCER = "rollout"
"""Role that puts rows; every other role adds columns."""
EXTENT_BYTES_PER_COLUMN = 256
"""Table entry, offsets and alignment of a column, also where each sample comes in an extent of its own."""


@dataclass(frozen=True)
class Field:
    """A typed column; `shape` is that of one value, -1 the ragged dimension (at most one, first or last).

    Without slots: what every column that comes is compared with is computed once.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    scope: Scope
    writer: str
    bytes_max: int = 0

    @property
    def ragged(self) -> bool:
        return -1 in self.shape

    @property
    def transposed(self) -> bool:
        return self.ragged and self.shape[0] != -1

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of one entry as an extent keeps it: the ragged dimension is left out."""
        return tuple(n for n in self.shape if n != -1)

    def value_bytes_max(self, tokens_per_row_max: int) -> int:
        if self.bytes_max:
            return self.bytes_max
        return self.entry_bytes * (tokens_per_row_max if self.ragged else 1)

    @cached_property
    def form(self) -> Form:
        return Form(np.dtype(self.dtype), self.scope, self.ragged, self.transposed, self.stored_shape)

    @cached_property
    def entry_bytes(self) -> int:
        """Of a value, or of one of its entries along the ragged dimension."""
        return np.dtype(self.dtype).itemsize * math.prod(self.stored_shape)


@dataclass(frozen=True, slots=True)
class Consumer:
    """A named reader; `needs_version` is "step" or "any"."""

    name: str
    fields: tuple[str, ...]
    needs_version: Literal["step", "any"] = "any"


@dataclass(frozen=True)
class RunSpec:
    """Schema and sizes of a run; the names are those of the recipe. Without slots: sizes are computed once."""

    fields: tuple[Field, ...]
    consumers: tuple[Consumer, ...]
    prompts_per_step: int
    samples_per_prompt: int
    max_staleness: int
    snapshot_every: int
    tokens_per_row_max: int
    tokens_per_microbatch: int
    groups_per_chunk: int
    data_parallel_size: int
    shaper: Shaper
    stale_policy: StalePolicy
    min_valid_samples: int
    max_refills_per_step: int
    memory_budget_bytes: int
    lease_ttl_seconds: float
    total_steps: int = 0
    durability: Durability = "metadata"
    seed: int = 0
    deterministic: bool = False
    closing: Closing = "all"
    closing_min_prompts: int = 0
    closing_deadline_seconds: float = 0.0
    lease_attempts_max: int = 0

    def field(self, name: str) -> Field:
        for f in self.fields:
            if f.name == name:
                return f
        known = ", ".join(f.name for f in self.fields)
        raise UnknownField(f"field {name} is not in the schema of the run; it has {known}")

    def written_by(self, role: str) -> tuple[Field, ...]:
        return tuple(f for f in self.fields if f.writer == role)

    @cached_property
    def put_fields(self) -> dict[str, Field]:
        """By name, those that come with a put."""
        return {f.name: f for f in self.written_by(PRODUCER)}

    @cached_property
    def bytes_per_group(self) -> int:
        """Most bytes that all fields of one group take, with offsets and alignment of its extents."""
        units = {"row": self.samples_per_prompt, "sample": self.samples_per_prompt, "group": 1}
        size = 0
        for f in self.fields:
            size += units[f.scope] * (f.value_bytes_max(self.tokens_per_row_max) + EXTENT_BYTES_PER_COLUMN)
        return size + 4096

    @property
    def groups_held_max(self) -> int:
        """Groups that may hold payload at once: the open ones and those kept for a replay."""
        return (self.max_staleness + 1 + self.snapshot_every) * self.prompts_per_step

    @property
    def bytes_needed(self) -> int:
        return self.groups_held_max * self.bytes_per_group


def _check_field(f: Field) -> None:
    if not f.name or not f.writer:
        raise BadSchema(f"field {f.name!r} needs a name and the role that writes it")
    if f.dtype not in DTYPES:
        raise BadSchema(f"field {f.name}: dtype {f.dtype!r} is none of {', '.join(DTYPES)}")
    if any(n < -1 or n == 0 for n in f.shape) or f.shape.count(-1) > 1:
        raise BadSchema(f"field {f.name}: shape {list(f.shape)} needs positive sizes and at most one -1")
    if f.transposed and f.shape[-1] != -1:
        raise BadSchema(f"field {f.name}: the ragged dimension of {list(f.shape)} is neither first nor last")


def _check_closing(spec: RunSpec) -> None:
    if not 1 <= spec.closing_min_prompts <= spec.prompts_per_step:
        raise BadSpec(
            f"closing_min_prompts is {spec.closing_min_prompts}, it must be between 1 and prompts_per_step "
            f"{spec.prompts_per_step}",
        )
    if spec.closing_deadline_seconds <= 0:
        raise BadSpec(
            f"closing_deadline_seconds is {spec.closing_deadline_seconds}, closing min_n needs a positive one",
        )


def check_spec(spec: RunSpec) -> None:
    """Raises a typed error that names what is wrong and what to change (I4, I5)."""
    names = [f.name for f in spec.fields]
    for f in spec.fields:
        _check_field(f)
    for name in names:
        if names.count(name) > 1:
            raise BadSchema(f"field {name} occurs twice in the schema")
    for c in spec.consumers:
        for name in c.fields:
            if name not in names:
                raise NoWriter(f"consumer {c.name} reads field {name}, which nobody in this run writes")
    for size in ("prompts_per_step", "samples_per_prompt", "snapshot_every", "tokens_per_row_max", "data_parallel_size",
                 "tokens_per_microbatch"):  # fmt: skip
        if getattr(spec, size) < 1:
            raise BadSpec(f"{size} is {getattr(spec, size)}, it must be at least 1")
    if not 1 <= spec.groups_per_chunk <= spec.prompts_per_step:
        raise BadSpec(f"groups_per_chunk is {spec.groups_per_chunk}, prompts_per_step {spec.prompts_per_step}")
    if spec.min_valid_samples > spec.samples_per_prompt:
        raise BadSpec(
            f"min_valid_samples is {spec.min_valid_samples}, more than samples_per_prompt {spec.samples_per_prompt}",
        )
    if spec.closing == "min_n":
        _check_closing(spec)
    if spec.lease_ttl_seconds <= 0:
        raise BadSpec(f"lease_ttl_seconds is {spec.lease_ttl_seconds}, it must be positive")
    if spec.bytes_needed > spec.memory_budget_bytes:
        raise OverBudget(
            f"(max_staleness {spec.max_staleness} + 1 + snapshot_every {spec.snapshot_every}) steps of "
            f"{spec.prompts_per_step} groups at {spec.bytes_per_group} bytes need {spec.bytes_needed} bytes, "
            f"memory_budget_bytes is {spec.memory_budget_bytes}: raise it or lower one of the others",
        )
