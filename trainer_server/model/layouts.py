"""How one Megatron parameter is made of Hugging Face tensors, and which part of each a TP rank holds.

A layout gives two things for a rank: the pieces (which slice of which Hugging Face tensor, in the order of the rule's
names) and one view into the parameter per piece. Publishing and exporting read the views, loading copies into them, so
both directions share one description.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from trainer_server.model.hf_config import ModelShape


@dataclass(frozen=True)
class Piece:
    """A slice of a Hugging Face tensor: start and extent per dimension of `full_shape`."""

    full_shape: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]


@dataclass(frozen=True)
class GroupRank:
    """A rank's place in a group, for example the tensor-parallel one."""

    rank: int
    size: int


ALONE = GroupRank(0, 1)


@dataclass(frozen=True)
class Place:
    """Which part of the model a rank holds: its share of the tensors that are split, and which of the experts."""

    tensor: GroupRank = ALONE
    expert: GroupRank = ALONE


class Layout(Protocol):
    @property
    def replicated(self) -> bool: ...  # every TP rank holds the same piece

    def pieces(self, shape: ModelShape, tp: GroupRank) -> list[Piece]: ...

    def views(self, parameter: torch.Tensor, shape: ModelShape, tp: GroupRank) -> list[torch.Tensor]: ...


def _split(full: tuple[int, ...], dim: int, tp: GroupRank) -> Piece:
    extent = list(full)
    extent[dim] = full[dim] // tp.size
    start = [0] * len(full)
    start[dim] = tp.rank * extent[dim]
    return Piece(full, tuple(start), tuple(extent))


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    return -(-vocab_size // tensor_parallel) * tensor_parallel


@dataclass(frozen=True)
class Replicated:
    """A norm weight; `per_head` has one element per channel of a head."""

    per_head: bool = False
    replicated: bool = True

    def pieces(self, shape: ModelShape, tp: GroupRank) -> list[Piece]:
        size = shape.head_size if self.per_head else shape.hidden_size
        return [Piece((size,), (0,), (size,))]

    def views(self, parameter: torch.Tensor, shape: ModelShape, tp: GroupRank) -> list[torch.Tensor]:
        return [parameter]


@dataclass(frozen=True)
class RouterRows:
    """[experts, hidden]: every rank routes its own tokens to all experts."""

    replicated: bool = True

    def pieces(self, shape: ModelShape, tp: GroupRank) -> list[Piece]:
        full = (shape.experts, shape.hidden_size)
        return [Piece(full, (0, 0), full)]

    def views(self, parameter: torch.Tensor, shape: ModelShape, tp: GroupRank) -> list[torch.Tensor]:
        return [parameter]


@dataclass(frozen=True)
class VocabularyRows:
    """[vocabulary, hidden], split by rows. Megatron pads the vocabulary at its end; no piece shows that."""

    replicated: bool = False

    def pieces(self, shape: ModelShape, tp: GroupRank) -> list[Piece]:
        rows = padded_vocab_size(shape.vocab_size, tp.size) // tp.size
        start = min(tp.rank * rows, shape.vocab_size)
        stop = min(start + rows, shape.vocab_size)
        full = (shape.vocab_size, shape.hidden_size)
        return [Piece(full, (start, 0), (stop - start, shape.hidden_size))]

    def views(self, parameter: torch.Tensor, shape: ModelShape, tp: GroupRank) -> list[torch.Tensor]:
        return [parameter[: self.pieces(shape, tp)[0].extent[0]]]


@dataclass(frozen=True)
class InputColumns:
    """A row-parallel weight [hidden, inputs]: `inputs` is split over the ranks."""

    attention: bool  # inputs are the heads' outputs, else the feed-forward channels
    replicated: bool = False

    def pieces(self, shape: ModelShape, tp: GroupRank) -> list[Piece]:
        inputs = shape.heads * shape.head_size if self.attention else shape.ffn_size
        return [_split((shape.hidden_size, inputs), 1, tp)]

    def views(self, parameter: torch.Tensor, shape: ModelShape, tp: GroupRank) -> list[torch.Tensor]:
        return [parameter]


@dataclass(frozen=True)
class FusedQkv:
    """A weight [heads * channels, hidden] or a bias [heads * channels]. Per KV head, Megatron stores its query heads,
    then the key head, then the value head."""

    bias: bool = False
    replicated: bool = False

    def pieces(self, shape: ModelShape, tp: GroupRank) -> list[Piece]:
        rows = [n * shape.head_size for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
        return [_split((n,) if self.bias else (n, shape.hidden_size), 0, tp) for n in rows]

    def views(self, parameter: torch.Tensor, shape: ModelShape, tp: GroupRank) -> list[torch.Tensor]:
        per_kv = shape.heads // shape.kv_heads
        fused = parameter.view(shape.kv_heads // tp.size, per_kv + 2, shape.head_size, *parameter.shape[1:])
        return [fused[:, :per_kv], fused[:, per_kv], fused[:, per_kv + 1]]


@dataclass(frozen=True)
class FusedGateUp:
    """Megatron's first feed-forward weight is the rank's gate rows followed by its up rows."""

    replicated: bool = False

    def pieces(self, shape: ModelShape, tp: GroupRank) -> list[Piece]:
        return [_split((shape.ffn_size, shape.hidden_size), 0, tp)] * 2

    def views(self, parameter: torch.Tensor, shape: ModelShape, tp: GroupRank) -> list[torch.Tensor]:
        return list(parameter.chunk(2, dim=0))
