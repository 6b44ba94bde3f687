"""Causal attention over packed rows on torch's scaled_dot_product_attention.

Rows of a micro-batch lie one after the other; a token attends to earlier tokens of its own row only. A mask
over the whole pack would cost (tokens in the pack)^2. Rows are instead gathered into one padded batch per
class of lengths (powers of two), where plain causal attention is the same thing: padding lies behind every
real token of its row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class LengthClass:
    """`gather` [rows * longest] are token positions in the pack (padding repeats the row's last token);
    `keep` are the places in `gather` that are real, or None where all are."""

    rows: int
    gather: torch.Tensor
    keep: torch.Tensor | None


@dataclass(frozen=True)
class AttentionLayout:
    """`order` brings the classes' real tokens back to pack order; None where they already are."""

    classes: tuple[LengthClass, ...]
    order: torch.Tensor | None


@dataclass
class PackedRows(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a pack, with the layout computed once instead of in every layer."""

    layout: AttentionLayout | None = None


def attention_layout(lengths: Sequence[int], device: torch.device) -> AttentionLayout:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    by_class: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        by_class.setdefault((length - 1).bit_length(), []).append(row)
    classes: list[LengthClass] = []
    places: list[torch.Tensor] = []
    for _, rows in sorted(by_class.items()):
        count = torch.tensor([lengths[row] for row in rows])
        first = torch.tensor([starts[row] for row in rows])
        offset = torch.arange(int(count.max()))[None, :]
        gather = (first[:, None] + torch.minimum(offset, count[:, None] - 1)).flatten()
        real = (offset < count[:, None]).flatten()
        keep = None if bool(real.all()) else real.nonzero().squeeze(1)
        places.append(gather if keep is None else gather[keep])
        classes.append(LengthClass(len(rows), gather.to(device), None if keep is None else keep.to(device)))
    order = torch.cat(places).argsort()
    in_order = bool((order == torch.arange(len(order))).all())
    return AttentionLayout(tuple(classes), None if in_order else order.to(device))


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


class PackedCoreAttention(MegatronModule):  # type: ignore[misc]
    """Megatron's `core_attention` for packed rows. Returns [tokens, heads * channels]."""

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(config=config)
        self.scale = kwargs.get("softmax_scale") or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
    ) -> torch.Tensor:
        if packed_seq_params is None or packed_seq_params.layout is None:
            raise ValueError("this attention takes packed rows only: pass PackedRows with its layout")
        attended = packed_causal_attention(query, key, value, packed_seq_params.layout, self.scale)
        return attended.reshape(attended.size(0), -1)
