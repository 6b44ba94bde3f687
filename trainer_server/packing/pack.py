"""Rows of a micro-batch, concatenated (THD), as tensors; a prefix that rows of a group share is in the pack once.

Every sample of a group repeats its prompt. In a pack the prompt is computed once, and the samples' tokens follow it.
This is exact, because a model computes the same values for the same tokens at the same positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_common.rows import RowKey
from trainer_server.maths.sequences import Sequences
from trainer_server.packing.attention import AttentionLayout, RowPlaces, attention_layout
from trainer_server.packing.rows import TrainRow

_DUMMY_KEY = RowKey("", 0, 0)


@dataclass(frozen=True)
class Pack:
    """tokens [1, T], positions [3, 1, T], bounds [rows + 1], places [P]; the other tensors are [P], one value per
    predicted token.

    `bounds` are the ends of what each row adds to the pack; `longest` is the length of the longest whole row (Megatron
    sizes per-row tables by it, not by the pack). The logits at `places` predict the tokens `targets`. `row_versions` is
    the one version that sampled all trained tokens of a target's row, or -1 where there are several. `sequences` says
    which targets belong to one sample.
    """

    rows: tuple[TrainRow, ...]
    tokens: Tensor
    positions: Tensor
    bounds: Tensor
    longest: int
    layout: AttentionLayout
    places: Tensor
    targets: Tensor
    mask: Tensor
    rollout: Tensor
    row_versions: Tensor
    advantages: Tensor
    weights: Tensor
    temperatures: Tensor
    sequences: Sequences
    old: Tensor | None = None
    reference: Tensor | None = None
    teacher: Tensor | None = None
    selected: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None


def pack_rows(rows: Sequence[TrainRow], device: torch.device, predict: Literal["trained", "all"] = "trained") -> Pack:
    """`predict`: the trained tokens only, or every token but the first of each row. If a pack trains nothing, it gets
    one target with mask 0, so that ranks stay in step."""
    if not rows or not all(len(row.tokens) for row in rows):
        raise ValueError("a pack needs at least one row, and every row at least one token")
    laid = _places(rows)
    own = [np.arange(place.shared, len(place.places)) for place in laid]
    predicted = [np.arange(1, len(row.tokens)) if predict == "all" else _trained(row) for row in rows]
    if not any(map(len, predicted)):
        predicted[0] = np.zeros(1, np.int64)
    counts = [len(at) for at in predicted]
    tokens = np.concatenate([row.tokens[at] for row, at in zip(rows, own, strict=True)])

    def moved(values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(device)

    def of_target(columns: Sequence[NDArray[np.generic]]) -> Tensor:
        return moved(np.concatenate([column[at] for column, at in zip(columns, predicted, strict=True)]))

    def of_row(values: Sequence[float], dtype: type[np.generic] = np.float32) -> Tensor:
        return moved(np.repeat(np.asarray(values, dtype), counts))

    def optional(columns: Sequence[NDArray[np.generic] | None]) -> Tensor | None:
        present = [column for column in columns if column is not None]
        return of_target(present) if len(present) == len(columns) else None

    return Pack(
        rows=tuple(rows),
        tokens=moved(tokens.astype(np.int64))[None],
        positions=moved(np.concatenate(own)).expand(3, 1, -1),
        bounds=moved(np.cumsum([0, *(len(each) for each in own)], dtype=np.int32)),
        longest=max(len(row.tokens) for row in rows),
        layout=attention_layout(laid, device),
        places=moved(np.concatenate([place.places[at - 1] for place, at in zip(laid, predicted, strict=True)])),
        targets=of_target([row.tokens for row in rows]).long(),
        mask=of_target([row.loss_mask for row in rows]),
        rollout=of_target([row.log_probs for row in rows]),
        row_versions=of_row([_one_version(row) for row in rows], np.int64),
        advantages=of_target([row.advantages for row in rows]),
        weights=of_row([row.weight for row in rows]),
        temperatures=of_row([row.temperature for row in rows]),
        sequences=Sequences(moved(_per_sample(rows, counts))),
        old=optional([row.old_log_probs for row in rows]),
        reference=optional([row.ref_log_probs for row in rows]),
        teacher=optional([row.teacher_log_probs for row in rows]),
        selected=optional([row.selected for row in rows]),
        values=optional([row.values for row in rows]),
        returns=optional([row.returns for row in rows]),
    )


def _per_sample(rows: Sequence[TrainRow], counts: Sequence[int]) -> NDArray[np.int64]:
    """Predicted tokens of each sample; its rows stand one after another."""
    sizes = [(row.key[:2], n) for row, n in zip(rows, counts, strict=True)]
    return np.array([sum(n for _, n in same) for _, same in groupby(sizes, key=lambda size: size[0])], np.int64)


def _places(rows: Sequence[TrainRow]) -> list[RowPlaces]:
    """A row shares its common prefix with the first row of its group."""
    first: dict[str, tuple[NDArray[np.int32], NDArray[np.int64]]] = {}
    laid: list[RowPlaces] = []
    end = 0
    for row in rows:
        tokens, places = first.get(row.key.group, (row.tokens[:0], np.zeros(0, np.int64)))
        shared = _common(tokens, row.tokens)
        added = len(row.tokens) - shared
        laid.append(RowPlaces(np.concatenate([places[:shared], np.arange(end, end + added)]), shared))
        first.setdefault(row.key.group, (row.tokens, laid[-1].places))
        end += added
    return laid


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Length of the common prefix."""
    n = min(len(one), len(other))
    different = (one[:n] != other[:n]).nonzero()[0]
    return int(different[0]) if len(different) else n


def _trained(row: TrainRow) -> NDArray[np.int64]:
    return row.loss_mask.nonzero()[0]


def _one_version(row: TrainRow) -> int:
    trained = row.versions[row.loss_mask]
    return int(trained[0]) if trained.size and (trained == trained[0]).all() else -1


def dummy_pack(device: torch.device) -> Pack:
    """A pack for ranks with fewer micro-batches, so that they stay in step. Its mask is empty, so it adds exactly 0."""
    empty: dict[str, np.ndarray] = {
        "tokens": np.zeros(1, np.int32),
        "loss_mask": np.zeros(1, np.bool_),
        "log_probs": np.zeros(1, np.float32),
        "old_log_probs": np.zeros(1, np.float32),
        "ref_log_probs": np.zeros(1, np.float32),
        "teacher_log_probs": np.zeros(1, np.float32),
        "versions": np.full(1, -1, np.int64),
        "advantages": np.zeros(1, np.float32),
        "selected": np.zeros(1, np.bool_),
        "values": np.zeros(1, np.float32),
        "returns": np.zeros(1, np.float32),
    }
    pack = pack_rows([TrainRow(key=_DUMMY_KEY, temperature=1.0, weight=0.0, **empty)], device)
    return Pack(**{**vars(pack), "rows": ()})
