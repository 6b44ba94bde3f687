"""A row as the loss needs it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relax_common.rows import RowKey
from relax_common.versions import NUMBER_MASK


@dataclass(frozen=True)
class TrainRow:
    """Arrays are [tokens of the row]: token ids, which of them were sampled and are trained, their
    rollout log-prob, the packed policy version that sampled them (-1: not sampled), their advantage; and, where the
    algorithm asks for them, the log-probs at the start of the step, of the reference and of a teacher, which tokens it
    has selected, and, for a critic, the values that advantages were computed with and the returns.

    `weight` belongs to the sample. Tokens with advantage 0 are still counted and measured.
    """

    key: RowKey
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    log_probs: NDArray[np.float32]
    versions: NDArray[np.int64]
    temperature: float
    advantages: NDArray[np.float32]
    weight: float = 1.0
    old_log_probs: NDArray[np.float32] | None = None
    ref_log_probs: NDArray[np.float32] | None = None
    teacher_log_probs: NDArray[np.float32] | None = None
    selected: NDArray[np.bool_] | None = None
    values: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None


NO_KEY = RowKey("", 0, 0)
"""The key of a row that is in no group, such as a row of the probe."""


def plain_row(tokens: NDArray[np.generic], temperature: float = 1.0, key: RowKey = NO_KEY) -> TrainRow:
    """A row for which only log-probs are computed; nothing in it is trained."""
    n = len(tokens)
    return TrainRow(
        key=key,
        tokens=np.asarray(tokens, np.int32),
        loss_mask=np.zeros(n, np.bool_),
        log_probs=np.zeros(n, np.float32),
        versions=np.full(n, -1, np.int64),
        temperature=temperature,
        advantages=np.zeros(n, np.float32),
    )


def staleness_by_sample(rows: Sequence[TrainRow], version: int) -> list[int]:
    """For each sample: the version being trained (packed) minus the version of its oldest trained token. Samples
    without a trained token are left out."""
    oldest: dict[tuple[str, int], int] = {}
    for row in rows:
        trained = row.versions[row.loss_mask]
        if trained.size:
            sample = (row.key.group, row.key.sample)
            number = int((trained & NUMBER_MASK).min())
            oldest[sample] = min(number, oldest.get(sample, number))
    return [(version & NUMBER_MASK) - number for number in oldest.values()]


@dataclass(frozen=True)
class RowLimits:
    vocab_size: int
    max_tokens: int


def refusal(row: TrainRow, limits: RowLimits) -> str | None:
    """Why this row cannot be trained on, or None."""
    n = len(row.tokens)
    if n == 0:
        return "has no tokens"
    if n > limits.max_tokens:
        return f"has {n} tokens, the model's context is {limits.max_tokens}"
    for name, column in (("loss_mask", row.loss_mask), ("log_probs", row.log_probs), ("versions", row.versions)):
        if len(column) != n:
            return f"has {n} tokens but {len(column)} values of {name}"
    outside = (row.tokens < 0) | (row.tokens >= limits.vocab_size)
    if outside.any():
        at = int(outside.argmax())
        return f"has id {int(row.tokens[at])} at position {at}, the vocabulary ends at {limits.vocab_size - 1}"
    if row.loss_mask[0]:
        return "trains its first token, which nothing predicts"
    if not np.isfinite(row.log_probs[row.loss_mask]).all():
        return "has a log-prob that is not finite on a trained token"
    if not (np.isfinite(row.temperature) and row.temperature > 0):
        return f"has temperature {row.temperature}"
    return None


def all_usable(
    offsets: NDArray[np.int64],
    tokens: NDArray[np.integer],
    loss_mask: NDArray[np.bool_],
    log_probs: NDArray[np.floating],
    temperatures: NDArray[np.floating],
    limits: RowLimits,
) -> bool:
    """Whether `refusal` finds nothing in any of these rows: columns of one row after another, all with `offsets`."""
    lengths = np.diff(offsets)
    return bool(
        (lengths > 0).all()
        and (lengths <= limits.max_tokens).all()
        and ((tokens >= 0) & (tokens < limits.vocab_size)).all()
        and not loss_mask[offsets[:-1]].any()
        and np.isfinite(log_probs[loss_mask]).all()
        and (np.isfinite(temperatures) & (temperatures > 0)).all()
    )
