"""A family: one table from Megatron parameter names to Hugging Face names, read in both directions."""

from collections.abc import Callable
from dataclasses import dataclass

from trainer_server.model.hf_config import Config, ModelShape
from trainer_server.model.layouts import Layout


@dataclass(frozen=True)
class Rule:
    """`megatron` and each of `hugging_face` may contain `{layer}`, and `{expert}`."""

    megatron: str
    hugging_face: tuple[str, ...]
    layout: Layout

    @property
    def of_expert(self) -> bool:
        return "{expert}" in self.megatron


@dataclass(frozen=True)
class Family:
    architecture: str
    rules: tuple[Rule, ...]
    read_shape: Callable[[Config], ModelShape]
    head_norms: bool  # queries and keys are normalised per head
    qkv_bias: bool
