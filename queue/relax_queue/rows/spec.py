"""What the broker must know of a run: its schema, its sizes, and what follows from them."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from relax_common.errors import BadSchema, BadSpec, NoWriter, OverBudget, UnknownField
from relax_common.rows import ITEM_BYTES, PRODUCER, Field, bytes_per_group
from relax_queue.rows.column_block import Form

Packer = Literal["sequential", "whole_groups", "length_balanced", "token_budget"]
StalePolicy = Literal["wait", "mask", "regenerate", "drop"]
Closing = Literal["all", "min_n"]
Durability = Literal["metadata", "full"]

LISTED_MAX = 1 << 16
"""Samples of a group, and ranks. Plans and messages list them, however few there are in fact, so a slip of the hand
must not ask for billions."""
FIELDS_MAX = 1000

TOKENS, LOSS_MASK, VERSIONS = "tokens", "loss_mask", "versions"
REWARD, REWARD_STATUS = "reward", "reward_status"


def form_of(field: Field) -> Form:
    return Form(np.dtype(field.dtype), field.scope, field.ragged, field.transposed, field.stored_shape)


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
    packer: Packer
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
        """By name, the fields that come with a put."""
        return {f.name: f for f in self.written_by(PRODUCER)}

    @cached_property
    def forms(self) -> dict[str, Form]:
        """By field name, how a block of columns must hold it."""
        return {f.name: form_of(f) for f in self.fields}

    @cached_property
    def bytes_per_group(self) -> int:
        return bytes_per_group(self.fields, self.samples_per_prompt, self.tokens_per_row_max)

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
    if f.dtype not in ITEM_BYTES:
        raise BadSchema(f"field {f.name}: dtype {f.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
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
    if not spec.closing_deadline_seconds > 0:
        raise BadSpec(
            f"closing_deadline_seconds is {spec.closing_deadline_seconds}, closing min_n needs a positive one",
        )


def _check_schema(spec: RunSpec) -> None:
    names = {f.name for f in spec.fields}
    if len(spec.fields) > FIELDS_MAX or len(spec.consumers) > FIELDS_MAX:
        raise BadSchema(
            f"the schema has {len(spec.fields)} fields and {len(spec.consumers)} consumers, at most {FIELDS_MAX} may be"
        )
    for f in spec.fields:
        _check_field(f)
    if len(names) < len(spec.fields):
        twice = next(name for name, n in Counter(f.name for f in spec.fields).items() if n > 1)
        raise BadSchema(f"field {twice} occurs twice in the schema")
    for c in spec.consumers:
        for name in c.fields:
            if name not in names:
                raise NoWriter(f"consumer {c.name} reads field {name}, which nobody in this run writes")


def check_spec(spec: RunSpec) -> None:
    """Raises a typed error that names what is wrong and what to change (I4, I5)."""
    _check_schema(spec)
    for size in ("prompts_per_step", "samples_per_prompt", "snapshot_every", "tokens_per_row_max", "data_parallel_size",
                 "tokens_per_microbatch"):  # fmt: skip
        if getattr(spec, size) < 1:
            raise BadSpec(f"{size} is {getattr(spec, size)}, it must be at least 1")
    for size in ("samples_per_prompt", "data_parallel_size"):
        if getattr(spec, size) > LISTED_MAX:
            raise BadSpec(f"{size} is {getattr(spec, size)}, it must be at most {LISTED_MAX}")
    if not 1 <= spec.groups_per_chunk <= spec.prompts_per_step:
        raise BadSpec(f"groups_per_chunk is {spec.groups_per_chunk}, prompts_per_step {spec.prompts_per_step}")
    if spec.min_valid_samples > spec.samples_per_prompt:
        raise BadSpec(
            f"min_valid_samples is {spec.min_valid_samples}, more than samples_per_prompt {spec.samples_per_prompt}",
        )
    if spec.closing == "min_n":
        _check_closing(spec)
    for name, least in (("lease_ttl_seconds", "positive"), ("closing_deadline_seconds", "0 or more")):
        value = getattr(spec, name)
        if not math.isfinite(value) or value < 0 or (value == 0 and least == "positive"):
            raise BadSpec(f"{name} is {value}, it must be a number of seconds, {least}")
    if spec.bytes_needed > spec.memory_budget_bytes:
        raise OverBudget(
            f"(max_staleness {spec.max_staleness} + 1 + snapshot_every {spec.snapshot_every}) steps of "
            f"{spec.prompts_per_step} groups at {spec.bytes_per_group} bytes need {spec.bytes_needed} bytes, "
            f"memory_budget_bytes is {spec.memory_budget_bytes}: raise it or lower one of the others",
        )
