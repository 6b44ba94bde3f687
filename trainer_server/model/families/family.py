"""A family: one table from Megatron parameter names to Hugging Face names, read in both directions.

Decoder families share how sizes are read from config.json, and most of their table.
"""

from collections.abc import Callable
from dataclasses import dataclass

from relax_common.errors import InvalidInput
from relax_common.model_support import check_config
from trainer_server.model.hf_config import Config, ModelError, ModelShape, plain_rope_base, required
from trainer_server.model.layouts import (
    FusedGateUp,
    FusedQkv,
    InputColumns,
    Layout,
    Replicated,
    RouterRows,
    VocabularyRows,
)

_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."
_ATTENTION, _HF_ATTENTION = _LAYER + "self_attention.", _HF_LAYER + "self_attn."


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


def read_decoder_shape(config: Config, architecture: str) -> ModelShape:
    try:
        check_config(config, architecture)
    except InvalidInput as error:
        raise ModelError(error.message) from error
    hidden_size = required(config, "hidden_size", int)
    heads = required(config, "num_attention_heads", int)
    kv_heads = required(config, "num_key_value_heads", int)
    if heads % kv_heads:
        raise ModelError(f"config.json: {heads} attention heads are not a multiple of {kv_heads} KV heads")
    return ModelShape(
        architecture=architecture,
        vocab_size=required(config, "vocab_size", int),
        hidden_size=hidden_size,
        ffn_size=required(config, "intermediate_size", int),
        layers=required(config, "num_hidden_layers", int),
        heads=heads,
        kv_heads=kv_heads,
        head_size=_head_size(config, hidden_size, heads),
        norm_epsilon=required(config, "rms_norm_eps", float),
        rope_base=plain_rope_base(config, default=10_000.0),
        max_positions=required(config, "max_position_embeddings", int),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _head_size(config: Config, hidden_size: int, heads: int) -> int:
    """Config files of older families leave it out: it is then the hidden size divided by the number of heads."""
    if config.get("head_dim") is not None:
        return int(required(config, "head_dim", int))
    if hidden_size % heads:
        raise ModelError(f"config.json: hidden_size {hidden_size} is not a multiple of {heads} attention heads")
    return hidden_size // heads


def dense_rules(*, head_norms: bool, qkv_bias: bool) -> tuple[Rule, ...]:
    """One feed-forward per layer."""
    return (*_shared_rules(head_norms, qkv_bias), *_feed_forward("mlp.", "mlp."))


def expert_rules(*, head_norms: bool, qkv_bias: bool) -> tuple[Rule, ...]:
    """Each layer routes to many feed-forwards; a rank may hold only some of them."""
    return (
        *_shared_rules(head_norms, qkv_bias),
        Rule(_LAYER + "mlp.router.weight", (_HF_LAYER + "mlp.gate.weight",), RouterRows()),
        *_feed_forward("mlp.experts.local_experts.{expert}.", "mlp.experts.{expert}."),
    )


def _feed_forward(ours: str, theirs: str) -> tuple[Rule, Rule]:
    up, down = _LAYER + ours + "linear_fc1.weight", _LAYER + ours + "linear_fc2.weight"
    gate_up = tuple(f"{_HF_LAYER}{theirs}{name}.weight" for name in ("gate_proj", "up_proj"))
    return (
        Rule(up, gate_up, FusedGateUp()),
        Rule(down, (f"{_HF_LAYER}{theirs}down_proj.weight",), InputColumns(attention=False)),
    )


def _shared_rules(head_norms: bool, qkv_bias: bool) -> tuple[Rule, ...]:
    qkv = tuple(_HF_ATTENTION + f"{name}." for name in ("q_proj", "k_proj", "v_proj"))
    rules = [
        Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VocabularyRows()),
        Rule(_LAYER + "input_layernorm.weight", (_HF_LAYER + "input_layernorm.weight",), Replicated()),
        Rule(_ATTENTION + "linear_qkv.weight", tuple(name + "weight" for name in qkv), FusedQkv()),
        Rule(_ATTENTION + "linear_proj.weight", (_HF_ATTENTION + "o_proj.weight",), InputColumns(attention=True)),
        Rule(_LAYER + "pre_mlp_layernorm.weight", (_HF_LAYER + "post_attention_layernorm.weight",), Replicated()),
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated()),
        Rule("output_layer.weight", ("lm_head.weight",), VocabularyRows()),
    ]
    if qkv_bias:
        rules.append(Rule(_ATTENTION + "linear_qkv.bias", tuple(name + "bias" for name in qkv), FusedQkv(bias=True)))
    if head_norms:
        rules += [
            Rule(_ATTENTION + f"{ours}.weight", (_HF_ATTENTION + f"{theirs}.weight",), Replicated(per_head=True))
            for ours, theirs in (("q_layernorm", "q_norm"), ("k_layernorm", "k_norm"))
        ]
    return tuple(rules)
