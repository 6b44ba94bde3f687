"""Rows of a micro-batch laid one after the other (THD), as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer_server.backend.attention import PackedRows, attention_layout
from trainer_server.backend.rows import RowKey, TrainRow

_DUMMY_KEY = RowKey("", 0, 0)


@dataclass(frozen=True)
class Pack:
    """tokens [1, T], positions [3, 1, T]; the rest [T].

    The logits at a position predict the next token, so `targets`, `mask` and `behaviour` at position t describe
    the token at t + 1 of the same row; a row's last position predicts nothing. `row_versions` is the one version
    that sampled all trained tokens of the row, -1 where there are several.
    """

    rows: tuple[TrainRow, ...]
    tokens: Tensor
    positions: Tensor
    packed: PackedRows
    targets: Tensor
    mask: Tensor
    behaviour: Tensor
    row_versions: Tensor
    advantages: Tensor
    weights: Tensor
    temperatures: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None


def pack_rows(rows: Sequence[TrainRow], device: torch.device) -> Pack:
    lengths = [len(row.tokens) for row in rows]
    if not rows or 0 in lengths:
        raise ValueError("a pack needs at least one row, and every row at least one token")

    ends = np.cumsum(lengths) - 1

    def per_token(values: Sequence[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, np.float32), lengths)).to(device)

    def of_next_token(columns: Sequence[np.ndarray], fill: int) -> Tensor:
        shifted = np.roll(np.concatenate(columns), -1)
        shifted[ends] = fill
        return torch.from_numpy(shifted).to(device)

    def optional(columns: Sequence[np.ndarray | None]) -> Tensor | None:
        present = [column for column in columns if column is not None]
        return of_next_token(present, fill=0) if len(present) == len(columns) else None

    positions = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])).to(device)
    tokens = np.concatenate([row.tokens for row in rows]).astype(np.int64)
    return Pack(
        rows=tuple(rows),
        tokens=torch.from_numpy(tokens)[None].to(device),
        positions=positions.expand(3, 1, -1),
        packed=packed_rows(lengths, device),
        targets=of_next_token([row.tokens for row in rows], fill=0).long(),
        mask=of_next_token([row.loss_mask for row in rows], fill=0),
        behaviour=of_next_token([row.log_probs for row in rows], fill=0),
        row_versions=torch.from_numpy(np.repeat([_one_version(row) for row in rows], lengths)).to(device),
        advantages=per_token([row.advantage for row in rows]),
        weights=per_token([row.weight for row in rows]),
        temperatures=per_token([row.temperature for row in rows]),
        old=optional([row.old_log_probs for row in rows]),
        reference=optional([row.ref_log_probs for row in rows]),
    )


def _one_version(row: TrainRow) -> int:
    trained = row.versions[row.loss_mask]
    return int(trained[0]) if trained.size and (trained == trained[0]).all() else -1


def dummy_pack(device: torch.device) -> Pack:
    """Keeps ranks in step where one has fewer micro-batches. Its mask is empty, so it adds exactly 0."""
    empty: dict[str, np.ndarray] = {
        "tokens": np.zeros(1, np.int32),
        "loss_mask": np.zeros(1, np.bool_),
        "log_probs": np.zeros(1, np.float32),
        "old_log_probs": np.zeros(1, np.float32),
        "ref_log_probs": np.zeros(1, np.float32),
        "versions": np.full(1, -1, np.int64),
    }
    pack = pack_rows([TrainRow(key=_DUMMY_KEY, temperature=1.0, advantage=0.0, weight=0.0, **empty)], device)
    return Pack(**{**vars(pack), "rows": ()})


def packed_rows(lengths: Sequence[int], device: torch.device) -> PackedRows:
    bounds = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32, device=device)
    longest = max(lengths)  # of one row: Megatron sizes per-row tables by it, not by the pack
    return PackedRows(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        layout=attention_layout(lengths, device),
    )
