"""Causal attention over packed rows on torch's scaled_dot_product_attention.

A token attends to earlier tokens of its own row only. A mask over the whole pack would cost (tokens in the
pack)^2. Rows are instead gathered into one padded batch per class of lengths (powers of two), where plain
causal attention is the same thing: padding comes after every real token of its row.

The first tokens of a row may already be in the pack as part of an earlier row. Such a row is gathered whole, the shared
tokens first and then its own, and only the results of its own tokens are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class RowPlaces:
    """The position of each token of a row in the pack; the first `shared` ones belong to an earlier row."""

    places: NDArray[np.int64]
    shared: int


@dataclass(frozen=True)
class LengthClass:
    """`gather` [rows * longest] are token positions in the pack (padding repeats the row's last token);
    `keep` are the places in `gather` that are the row's own, or None where all are."""

    rows: int
    gather: torch.Tensor
    keep: torch.Tensor | None


@dataclass(frozen=True)
class AttentionLayout:
    """`order` brings what the classes keep back to pack order; None where it already is."""

    classes: tuple[LengthClass, ...]
    order: torch.Tensor | None


def attention_layout(rows: Sequence[RowPlaces], device: torch.device) -> AttentionLayout:
    """The own tokens of all rows are the whole pack."""
    by_class: dict[int, list[RowPlaces]] = {}
    for row in rows:
        if row.shared < len(row.places):
            by_class.setdefault((len(row.places) - 1).bit_length(), []).append(row)
    classes: list[LengthClass] = []
    kept: list[NDArray[np.int64]] = []
    for _, members in sorted(by_class.items()):
        lengths = np.array([len(row.places) for row in members])
        shared = np.array([row.shared for row in members])
        offset = np.arange(lengths.max())[None, :]
        gather = np.concatenate([np.pad(row.places, (0, lengths.max() - len(row.places)), "edge") for row in members])
        own = ((offset >= shared[:, None]) & (offset < lengths[:, None])).ravel()
        kept.append(gather[own])
        keep = None if own.all() else torch.from_numpy(own.nonzero()[0]).to(device)
        classes.append(LengthClass(len(members), torch.from_numpy(gather).to(device), keep))
    order = np.concatenate(kept).argsort()
    in_order = bool((order == np.arange(len(order))).all())
    return AttentionLayout(tuple(classes), None if in_order else torch.from_numpy(order).to(device))


def packed_causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: AttentionLayout, scale: float
) -> torch.Tensor:
    """query [tokens, heads, channels], key and value [tokens, KV heads, channels] -> query's shape."""
    outputs = []
    for group in layout.classes:
        q, k, v = (_batched(tensor, group) for tensor in (query, key, value))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        flat = attended.transpose(1, 2).reshape(-1, *query.shape[1:])
        outputs.append(flat if group.keep is None else flat.index_select(0, group.keep))
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return packed if layout.order is None else packed.index_select(0, layout.order)


def _batched(tensor: torch.Tensor, group: LengthClass) -> torch.Tensor:
    gathered = tensor.index_select(0, group.gather)
    return gathered.view(group.rows, -1, *tensor.shape[1:]).transpose(1, 2)
