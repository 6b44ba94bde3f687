"""The events of a run, as frozen values; the log contains only events, and the state is their fold.

A transaction is a list of events that become durable together. Fields are plain values, so a transaction is one line of
JSON; values per row are packed columns in it. Group events carry everything a reader needs to rebuild the ledger
without the broker's own totals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import msgspec
import xxhash

from relax_common.versions import PackedVersion
from relax_queue.rows.facts import RowFacts, SampleFacts
from relax_queue.rows.row_keys import RowKeys
from relax_queue.rows.spec import RunSpec

LOST_LEASE = ("lease_expired", "lease_superseded")
"""Reasons of a requeue that count as a failed attempt; a server that gives a group back has not failed."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt group as it was offered."""

    group: str
    pass_over_data: int
    position: int
    prompt_json: str
    label: str | None
    metadata_json: str
    blobs: tuple[str, ...] = ()
    traceparent: str = ""

    @property
    def digest(self) -> int:
        """Distinguishes a repeated offer from one of another prompt after the text itself is forgotten."""
        content = (self.group, self.pass_over_data, self.position, self.prompt_json, self.label, self.metadata_json)
        return xxhash.xxh3_64_intdigest(repr((*content, self.blobs)).encode())


@dataclass(frozen=True, slots=True)
class RunOpened:
    run: str
    recipe_digest: str
    spec: RunSpec
    dcs_address: str
    kind: Literal["run_opened"] = "run_opened"


@dataclass(frozen=True, slots=True)
class DcsMoved:
    """The dcs of the run listens at another address."""

    dcs_address: str
    kind: Literal["dcs_moved"] = "dcs_moved"


@dataclass(frozen=True, slots=True)
class RunLengthened:
    """A resumed run has a later end; nothing else in its recipe has changed."""

    total_steps: int
    recipe_digest: str
    kind: Literal["run_lengthened"] = "run_lengthened"


@dataclass(frozen=True, slots=True)
class TermRegistered:
    holder: str
    term: int
    kind: Literal["term_registered"] = "term_registered"


@dataclass(frozen=True, slots=True)
class RunSealed:
    kind: Literal["run_sealed"] = "run_sealed"


@dataclass(frozen=True, slots=True)
class RunEnded:
    kind: Literal["run_ended"] = "run_ended"


@dataclass(frozen=True, slots=True)
class GroupOffered:
    """A group joins the pending queue; `again` after a rollback."""

    prompt: Prompt
    again: bool
    kind: Literal["offered"] = "offered"


@dataclass(frozen=True, slots=True)
class GroupLeased:
    group: str
    server: str
    term: int
    attempt: int
    confirmed: PackedVersion
    deadline: int
    discard_kept: bool
    kind: Literal["leased"] = "leased"


@dataclass(frozen=True, slots=True)
class RowsStored:
    """The rows of whole samples of a leased group are in one block; they replace what earlier leases left of them."""

    group: str
    block: int
    n_bytes: int
    digest: str
    rows: RowFacts
    samples: SampleFacts
    fields: tuple[str, ...]
    kind: Literal["rows_stored"] = "rows_stored"


@dataclass(frozen=True, slots=True)
class GroupCompleted:
    group: str
    attempt: int
    server: str
    n_samples: int
    n_valid_samples: int
    oldest_version: int | None
    reward_mean: float | None = None  # over valid samples
    generation_start_unix_seconds: float = 0.0
    generation_end_unix_seconds: float = 0.0
    kind: Literal["completed"] = "completed"


@dataclass(frozen=True, slots=True)
class GroupRequeued:
    """To the front of the pending queue, with its complete samples or without any token."""

    group: str
    reason: str
    keep: bool
    lease_lost: bool
    kind: Literal["requeued"] = "requeued"


@dataclass(frozen=True, slots=True)
class GroupMasked:
    """It may be trained until step `deadline`, without its tokens of versions before `oldest_trained`."""

    group: str
    oldest_trained: int
    deadline: int
    kind: Literal["masked"] = "masked"


@dataclass(frozen=True, slots=True)
class KeptFreed:
    """A pending group loses the samples that an earlier lease left."""

    group: str
    reason: str
    kind: Literal["kept_freed"] = "kept_freed"


@dataclass(frozen=True, slots=True)
class GroupDropped:
    group: str
    reason: str
    step: int
    detail: str = ""
    kind: Literal["dropped"] = "dropped"


@dataclass(frozen=True, slots=True)
class GroupUnplanned:
    """Its plan is void but its rows are kept: it is ready again."""

    group: str
    reason: str
    kind: Literal["unplanned"] = "unplanned"


@dataclass(frozen=True, slots=True)
class GroupTrained:
    group: str
    step: int
    kind: Literal["trained"] = "trained"


@dataclass(frozen=True, slots=True)
class GroupReturned:
    """The run ended before the group was trained."""

    group: str
    kind: Literal["returned"] = "returned"


@dataclass(frozen=True, slots=True)
class GroupRolledBack:
    """The group ended on a dead lineage; it must be offered again."""

    group: str
    kind: Literal["rolled_back"] = "rolled_back"


@dataclass(frozen=True, slots=True)
class AnswerStored:
    """The stored answer of a call; a repeat of the same call gets it."""

    key: str
    content: str
    answer: str
    kind: Literal["answer"] = "answer"


@dataclass(frozen=True, slots=True)
class FieldStored:
    """A role's column for rows of one group."""

    group: str
    field: str
    block: int
    n_bytes: int
    units: RowKeys
    kind: Literal["field_stored"] = "field_stored"


@dataclass(frozen=True, slots=True)
class Microbatch:
    rows: RowKeys
    n_tokens: int


@dataclass(frozen=True, slots=True)
class ChunkPlanned:
    """`ranks[r]` are the micro-batches of data-parallel rank r.

    `oldest_trained[i]` masks tokens of older versions in group i; empty where no group has any.
    """

    lineage: int
    step: int
    generation: int
    chunk: int
    groups: tuple[str, ...]
    ranks: tuple[tuple[Microbatch, ...], ...]
    oldest_trained: tuple[int, ...] = ()
    kind: Literal["planned"] = "planned"


@dataclass(frozen=True, slots=True)
class ClosingDue:
    """The closing deadline of a step has passed: it may close short."""

    step: int
    kind: Literal["closing_due"] = "closing_due"


@dataclass(frozen=True, slots=True)
class StepClosed:
    step: int
    generation: int
    n_chunks: int
    groups: tuple[str, ...]
    plan_digest: str
    n_tokens: int
    n_samples: int
    short_reason: str
    kind: Literal["step_closed"] = "step_closed"


@dataclass(frozen=True, slots=True)
class PlanLost:
    """The plan in progress is void; the next one has a new generation."""

    step: int
    generation: int
    reason: str
    kind: Literal["plan_lost"] = "plan_lost"


@dataclass(frozen=True, slots=True)
class PayloadLost:
    """The broker has restarted; rows of these steps, kept for a replay, are gone."""

    steps: tuple[int, ...]
    kind: Literal["payload_lost"] = "payload_lost"


@dataclass(frozen=True, slots=True)
class CommitFollowed:
    """`whole`: the rows and the plan of the commit are here, so the step can be replayed."""

    revision: int
    lineage: int
    version: int
    step: int | None
    whole: bool
    kind: Literal["commit"] = "commit"


@dataclass(frozen=True, slots=True)
class ConfirmFollowed:
    revision: int
    server: str
    term: int
    lineage: int
    version: int
    kind: Literal["confirmed"] = "confirmed"


@dataclass(frozen=True, slots=True)
class FrontierFollowed:
    """F has moved; rows of steps before it are no longer needed."""

    revision: int
    version: int
    kind: Literal["frontier"] = "frontier"


@dataclass(frozen=True, slots=True)
class RollbackFollowed:
    revision: int
    lineage: int
    head: int
    kind: Literal["rollback"] = "rollback"


Event = (
    RunOpened
    | DcsMoved
    | RunLengthened
    | TermRegistered
    | RunSealed
    | RunEnded
    | GroupOffered
    | GroupLeased
    | RowsStored
    | GroupCompleted
    | GroupRequeued
    | GroupMasked
    | KeptFreed
    | GroupDropped
    | GroupUnplanned
    | GroupTrained
    | GroupReturned
    | GroupRolledBack
    | AnswerStored
    | FieldStored
    | ChunkPlanned
    | ClosingDue
    | StepClosed
    | PlanLost
    | PayloadLost
    | CommitFollowed
    | ConfirmFollowed
    | FrontierFollowed
    | RollbackFollowed
)


@dataclass(frozen=True, slots=True)
class Transaction:
    """Events that became durable together, and when (seconds since 1970)."""

    unix_seconds: float
    events: tuple[Event, ...]


def width(transaction: Transaction) -> int:
    """Revisions that a transaction takes: one per event, or for a chunk of a plan one per group."""
    return sum(len(e.groups) if isinstance(e, ChunkPlanned) else 1 for e in transaction.events)


class _Line(msgspec.Struct):
    unix_seconds: float
    events: list[msgspec.Raw]


class _Kind(msgspec.Struct):
    kind: str


_ENCODER = msgspec.json.Encoder()
_LINE, _KIND = msgspec.json.Decoder(_Line), msgspec.json.Decoder(_Kind)
_BY_KIND: dict[str, msgspec.json.Decoder[Event]] = {
    cls.__dataclass_fields__["kind"].default: msgspec.json.Decoder(cls) for cls in get_args(Event)
}


def dump(transaction: Transaction) -> bytes:
    """One line of JSON."""
    return _ENCODER.encode(transaction)


def load(line: bytes) -> Transaction:
    """Raises msgspec.DecodeError where the line is no transaction of this version."""
    read = _LINE.decode(line)
    return Transaction(read.unix_seconds, tuple([_event(raw) for raw in read.events]))


def _event(raw: msgspec.Raw) -> Event:
    decoder = _BY_KIND.get(kind := _KIND.decode(raw).kind)
    if decoder is None:
        raise msgspec.ValidationError(f"{kind!r} is not a kind of event")
    return decoder.decode(raw)
