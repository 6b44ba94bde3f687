"""The row schema: every field that a row of training data may have, declared once.

Everything else is derived from it: the schema and the consumers that are sent to the queue, the bytes that recipe and
queue reserve, the columns that a rollout server puts, and what each role reads. A new field is one entry in `FIELDS`,
and one line in the role that writes or reads it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

Scope = Literal["row", "sample", "group"]

PRODUCER = "rollout"
"""The role that puts rows; every other role adds columns to them."""

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
}
"""Bytes of one item by dtype; a field has one of these."""

BYTES_PER_COLUMN = 256
"""Table entry, offsets and alignment of a column, reserved for each sample because each may be put alone."""
BYTES_PER_GROUP = 4096
"""Headers of a group's blocks."""


class RewardStatus(IntEnum):
    """The `reward_status` field. Only OK samples are valid; no other status is ever a reward of 0 (I11)."""

    OK = 0
    ERROR = 1
    TIMEOUT = 2
    INVALID = 3


@dataclass(frozen=True)
class Field:
    """A typed column. `shape` is the shape of one value; -1 is the ragged dimension, at most one, first or last.

    writer: the role that writes it. readers: the roles that read it, in a run with its writer.
    bytes_max: most bytes of one value; 0 means one item per token of the longest row.
    optional: only in runs whose algorithm asks for it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    scope: Scope
    writer: str
    readers: tuple[str, ...] = ()
    bytes_max: int = 0
    optional: bool = False

    @property
    def ragged(self) -> bool:
        return -1 in self.shape

    @property
    def transposed(self) -> bool:
        """Whether the ragged dimension is the last one: `[3, n]` is stored as `[n, 3]`."""
        return self.ragged and self.shape[0] != -1

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of one entry as it is stored, without the ragged dimension."""
        return tuple(n for n in self.shape if n != -1)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one value, or of one entry along the ragged dimension."""
        return ITEM_BYTES[self.dtype] * math.prod(self.stored_shape)

    def value_bytes_max(self, tokens_per_row_max: int) -> int:
        return self.bytes_max or self.entry_bytes * (tokens_per_row_max if self.ragged else 1)


_TRAINED = ("actor", "critic")
"""Roles that compute advantages and are trained on them."""
_FORWARD = ("actor_fwd", "reference", "teacher")
"""Roles that compute log-probs of whole rows."""

FIELDS = (
    Field("tokens", "int32", (-1,), "row", PRODUCER, (*_TRAINED, *_FORWARD)),
    Field("loss_mask", "uint8", (-1,), "row", PRODUCER, _TRAINED),
    Field("log_probs", "float32", (-1,), "row", PRODUCER, _TRAINED),
    Field("versions", "int64", (-1,), "row", PRODUCER, _TRAINED),
    Field("temperature", "float32", (), "sample", PRODUCER, (*_TRAINED, *_FORWARD)),
    Field("reward", "float32", (), "sample", PRODUCER, _TRAINED),
    Field("reward_status", "uint8", (), "sample", PRODUCER, _TRAINED),
    Field("reward_parts", "float32", (-1,), "sample", PRODUCER, ("actor",), bytes_max=256, optional=True),
    Field("old_log_probs", "float32", (-1,), "row", "actor_fwd", _TRAINED),
    Field("ref_log_probs", "float32", (-1,), "row", "reference", _TRAINED),
    Field("teacher_log_probs", "float32", (-1,), "row", "teacher", _TRAINED),
    Field("values", "float32", (-1,), "row", "critic", _TRAINED),
)
"""Ragged fields of rows have one value per token, prompt and response alike. `versions` are packed policy versions, -1
for a token that no policy sampled. `log_probs` are those of the engine that sampled; they are 0 where `loss_mask` is 0.
`values` are the critic's estimates of what is still to be earned when a
token is chosen. `reward_parts` are in the order of the recipe, NaN where a part abstains."""


def fields_written_by(roles: Collection[str], optional: Collection[str] = ()) -> tuple[Field, ...]:
    """The schema of a run in which these roles take part, with the optional fields that it asks for."""
    return tuple(f for f in FIELDS if f.writer in roles and (not f.optional or f.name in optional))


def fields_read_by(role: str, roles: Collection[str], optional: Collection[str] = ()) -> tuple[Field, ...]:
    """The fields that `role` reads in a run with these `roles`."""
    return tuple(field for field in fields_written_by(roles, optional) if role in field.readers)


def bytes_per_group(fields: Iterable[Field], samples_per_prompt: int, tokens_per_row_max: int) -> int:
    """The most bytes that all fields of one group take, with the tables, offsets and alignment of its blocks (I4)."""
    units = {"row": samples_per_prompt, "sample": samples_per_prompt, "group": 1}
    values = sum(units[f.scope] * (f.value_bytes_max(tokens_per_row_max) + BYTES_PER_COLUMN) for f in fields)
    return values + BYTES_PER_GROUP


class RowKey(NamedTuple):
    """One segment of one sample of one group; samples and segments count from 0."""

    group: str
    sample: int
    segment: int

    def __str__(self) -> str:
        return f"{self.group}/{self.sample}/{self.segment}"
