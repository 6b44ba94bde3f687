"""Plans as the client hands them to its callers."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import typed_error
from relax_queue.rows.row_keys import RowKeys, block_from


@dataclass(frozen=True, slots=True)
class PlannedMicrobatch:
    rows: RowKeys
    n_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """`ranks[r]` are the micro-batches of data-parallel rank r; ranks may have different counts, also none.

    `oldest_trained[i]`: tokens of group i sampled under an older version number leave its loss mask; the closing's
    denominators do not count them. Empty: no group has any.
    """

    index: int
    groups: tuple[str, ...]
    ranks: tuple[tuple[PlannedMicrobatch, ...], ...]
    oldest_trained: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepClosing:
    """Fixed when the step closed; the denominators are those of the whole step over all ranks."""

    n_chunks: int
    groups: tuple[str, ...]
    plan_digest: str
    n_tokens: int
    n_samples: int
    short_reason: str


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """Exactly one of `chunk`, `close` and `run_over` is set; `plan` names what ReadRows and the commit need."""

    plan: pb.PlanKey
    chunk: PlannedChunk | None
    close: StepClosing | None
    run_over: bool


def disposition(result: pb.PutResult) -> str:
    """The result of one of several puts; raises the typed error of a refusal."""
    if result.WhichOneof("result") == "refusal":
        refused = result.refusal
        raise typed_error(grpc.StatusCode[refused.code], refused.message, refused.reason, refused.details)
    return result.disposition


def plan_from(message: pb.GetPlanResponse) -> PlanAnswer:
    chunk, close = None, None
    kind = message.WhichOneof("answer")
    if kind == "chunk":
        ranks = tuple(
            tuple(PlannedMicrobatch(block_from(b.rows), b.tokens) for b in rank.microbatches)
            for rank in message.chunk.ranks
        )
        oldest = tuple(message.chunk.oldest_trained_versions)
        chunk = PlannedChunk(message.chunk.index, tuple(message.chunk.groups), ranks, oldest)
    elif kind == "close":
        c = message.close
        close = StepClosing(c.chunks, tuple(c.groups), c.plan_digest, c.n_tokens, c.n_samples, c.short_reason)
    return PlanAnswer(message.plan, chunk, close, kind == "run_over")
