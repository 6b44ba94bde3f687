"""A language model with a value per token in place of logits: the critic's model.

In Hugging Face's words it is a token classification model with one label, which is how it is exported.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from trainer_server.model.families.family import Rule
from trainer_server.model.hf_config import ModelShape
from trainer_server.model.layouts import GroupRank, Piece
from trainer_server.model.mapping import NameMap

FRESH = frozenset({"score.weight", "score.bias"})
"""Tensors that a language model's folder has not: they start as zeros, so that the first values are 0."""
OUTPUT_LAYER = "lm_head.weight"


@dataclass(frozen=True)
class ValueRow:
    """[1, hidden], or the [1] of its bias: the same on every tensor-parallel rank."""

    bias: bool = False
    replicated: bool = True

    def pieces(self, shape: ModelShape, tp: GroupRank) -> list[Piece]:
        full = (1,) if self.bias else (1, shape.hidden_size)
        return [Piece(full, (0,) * len(full), full)]

    def views(self, parameter: torch.Tensor, shape: ModelShape, tp: GroupRank) -> list[torch.Tensor]:
        return [parameter]


def with_value_head(names: NameMap) -> NameMap:
    """The same family with a value head. It never shares its weights with the embedding."""
    kept = tuple(rule for rule in names.family.rules if rule.hugging_face != (OUTPUT_LAYER,))
    head = (
        Rule("output_layer.weight", ("score.weight",), ValueRow()),
        Rule("output_layer.bias", ("score.bias",), ValueRow(bias=True)),
    )
    family = replace(names.family, rules=(*kept, *head))
    return NameMap(family, replace(names.shape, tied_embeddings=False), value_head=True)


class ValueHead(torch.nn.Linear):
    """Takes the place of Megatron's output layer."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__(hidden_size, 1, dtype=dtype)

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """[..., hidden] -> [..., 1]. Megatron also passes the weight of a tied embedding, which is not used."""
        return super().forward(hidden), None
