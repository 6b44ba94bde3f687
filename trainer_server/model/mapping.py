"""A rank's Megatron parameters under their Hugging Face names."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trainer_server.model.errors import ModelError
from trainer_server.model.families.family import Family, Rule
from trainer_server.model.hf_config import ModelShape
from trainer_server.model.layouts import Piece, TensorRank

_LAYER_INDEX = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


@dataclass(frozen=True)
class ParameterSlice:
    """The part of Hugging Face tensor `hf_name` that this rank holds.

    `view` aliases the Megatron parameter (or whatever tensor of its shape was mapped) and has as many
    elements as `piece.extent`, in the same order.
    """

    hf_name: str
    piece: Piece
    view: torch.Tensor
    replicated: bool

    def tensor(self) -> torch.Tensor:
        return self.view.detach().reshape(self.piece.extent)

    def fill(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.view.copy_(value.reshape(self.view.shape))


@dataclass(frozen=True)
class NameMap:
    family: Family
    shape: ModelShape

    def slices_of(self, megatron_name: str, tensor: torch.Tensor, tp: TensorRank) -> list[ParameterSlice]:
        """Hugging Face slices of one parameter, or of a gradient of its shape. Empty slices are left out."""
        rule, layer = self._rule_for(megatron_name)
        pieces = rule.layout.pieces(self.shape, tp)
        views = rule.layout.views(tensor, self.shape, tp)
        names = [name.format(layer=layer) for name in rule.hugging_face]
        return [
            ParameterSlice(name, piece, view, rule.layout.replicated)
            for name, piece, view in zip(names, pieces, views, strict=True)
            if 0 not in piece.extent
        ]

    def slices(self, module: torch.nn.Module, tp: TensorRank) -> Iterator[ParameterSlice]:
        """All slices that this rank holds, in the order of `named_parameters()`."""
        for name, parameter in module.named_parameters():
            yield from self.slices_of(name, parameter, tp)

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every Hugging Face tensor of the model with its full shape."""
        shapes: dict[str, tuple[int, ...]] = {}
        for rule in self.family.rules:
            if self.shape.tied_embeddings and rule.megatron == "output_layer.weight":
                continue
            pieces = rule.layout.pieces(self.shape, TensorRank(0, 1))
            for layer in range(self.shape.layers if "{layer}" in rule.megatron else 1):
                for name, piece in zip(rule.hugging_face, pieces, strict=True):
                    shapes[name.format(layer=layer)] = piece.full_shape
        return shapes

    def _rule_for(self, megatron_name: str) -> tuple[Rule, str]:
        match = _LAYER_INDEX.search(megatron_name)
        layer = match.group() if match else ""
        pattern = _LAYER_INDEX.sub("{layer}", megatron_name)
        for rule in self.family.rules:
            if rule.megatron == pattern:
                return rule, layer
        raise ModelError(f"{self.family.architecture}: no mapping for Megatron parameter {megatron_name}")
