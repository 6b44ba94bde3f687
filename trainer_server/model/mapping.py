"""A rank's Megatron parameters under their Hugging Face names."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trainer_server.model.families.family import Family, Rule
from trainer_server.model.hf_config import ModelError, ModelShape
from trainer_server.model.layouts import ALONE, GroupRank, Piece, Place

_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_LOCAL_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")


@dataclass(frozen=True)
class ParameterSlice:
    """The part of Hugging Face tensor `hf_name` that this rank holds.

    `view` aliases the Megatron parameter (or whatever tensor of its shape was mapped) and has as many
    elements as `piece.extent`, in the same order. All tensor-parallel ranks hold a `replicated` piece; a piece that is
    `of_expert` is held only by the ranks that have its expert.
    """

    hf_name: str
    piece: Piece
    view: torch.Tensor
    replicated: bool
    of_expert: bool

    def tensor(self) -> torch.Tensor:
        return self.view.detach().reshape(self.piece.extent)

    def fill(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.view.copy_(value.reshape(self.view.shape))


@dataclass(frozen=True)
class NameMap:
    """`value_head`: the model gives a value per token and no logits."""

    family: Family
    shape: ModelShape
    value_head: bool = False

    def slices_of(self, megatron_name: str, tensor: torch.Tensor, place: Place) -> list[ParameterSlice]:
        """Hugging Face slices of one parameter, or of a gradient of its shape. Empty slices are left out."""
        rule, layer, expert = self._rule_for(megatron_name, place.expert)
        layout = rule.layout
        pieces = layout.pieces(self.shape, place.tensor)
        views = layout.views(tensor, self.shape, place.tensor)
        names = [name.format(layer=layer, expert=expert) for name in rule.hugging_face]
        return [
            ParameterSlice(name, piece, view, layout.replicated, rule.of_expert)
            for name, piece, view in zip(names, pieces, views, strict=True)
            if 0 not in piece.extent
        ]

    def slices(self, module: torch.nn.Module, place: Place) -> Iterator[ParameterSlice]:
        """All slices that this rank holds, in the order of `named_parameters()`."""
        for name, parameter in module.named_parameters():
            yield from self.slices_of(name, parameter, place)

    def is_of_expert(self, megatron_name: str) -> bool:
        return self._rule_for(megatron_name, ALONE)[0].of_expert

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every Hugging Face tensor of the model with its full shape."""
        shapes: dict[str, tuple[int, ...]] = {}
        for rule in self.family.rules:
            if self.shape.tied_embeddings and rule.megatron == "output_layer.weight":
                continue
            layers = range(self.shape.layers if "{layer}" in rule.megatron else 1)
            experts = range(self.shape.experts if rule.of_expert else 1)
            for name, piece in zip(rule.hugging_face, rule.layout.pieces(self.shape, ALONE), strict=True):
                for layer, expert in itertools.product(layers, experts):
                    shapes[name.format(layer=layer, expert=expert)] = piece.full_shape
        return shapes

    def _rule_for(self, megatron_name: str, ep: GroupRank) -> tuple[Rule, str, int]:
        """The rule, and which layer and expert the parameter belongs to; a rank counts its own experts from 0."""
        layer, local = _LAYER.search(megatron_name), _LOCAL_EXPERT.search(megatron_name)
        pattern = _LOCAL_EXPERT.sub("{expert}", _LAYER.sub("{layer}", megatron_name))
        expert = int(local.group()) + ep.rank * (self.shape.experts // ep.size) if local else 0
        for rule in self.family.rules:
            if rule.megatron == pattern:
                return rule, layer.group() if layer else "", expert
        raise ModelError(f"{self.family.architecture}: no mapping for Megatron parameter {megatron_name}")
