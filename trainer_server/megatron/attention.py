"""Megatron's view of a pack: its description of packed sequences, and the attention that reads it."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule

from trainer_server.packing.attention import AttentionLayout, packed_causal_attention
from trainer_server.packing.pack import Pack


@dataclass
class PackedRows(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a pack, with the layout computed once instead of in every layer."""

    layout: AttentionLayout | None = None


def packed_rows(pack: Pack) -> PackedRows:
    return PackedRows(
        qkv_format="thd",
        cu_seqlens_q=pack.bounds,
        cu_seqlens_kv=pack.bounds,
        max_seqlen_q=pack.longest,
        max_seqlen_kv=pack.longest,
        layout=pack.layout,
    )


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
