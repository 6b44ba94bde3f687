"""Qwen3, dense."""

from typing import Any

from trainer_server.model.errors import ModelError
from trainer_server.model.families.family import Family, Rule
from trainer_server.model.hf_config import ModelShape, plain_rope_base, required
from trainer_server.model.layouts import FusedGateUp, FusedQkv, InputColumns, Replicated, VocabularyRows

ARCHITECTURE = "Qwen3ForCausalLM"

_FIXED = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


def read_shape(config: dict[str, Any]) -> ModelShape:
    for key, supported in _FIXED.items():
        if config.get(key, supported) != supported:
            raise ModelError(f"config.json: {ARCHITECTURE} with {key}={config[key]!r} is not supported")
    heads = required(config, "num_attention_heads", int)
    kv_heads = required(config, "num_key_value_heads", int)
    if heads % kv_heads:
        raise ModelError(f"config.json: {heads} attention heads are not a multiple of {kv_heads} KV heads")
    return ModelShape(
        architecture=ARCHITECTURE,
        vocab_size=required(config, "vocab_size", int),
        hidden_size=required(config, "hidden_size", int),
        ffn_size=required(config, "intermediate_size", int),
        layers=required(config, "num_hidden_layers", int),
        heads=heads,
        kv_heads=kv_heads,
        head_size=required(config, "head_dim", int),
        norm_epsilon=required(config, "rms_norm_eps", float),
        rope_base=plain_rope_base(config, default=10_000.0),
        max_positions=required(config, "max_position_embeddings", int),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")

QWEN3 = Family(
    architecture=ARCHITECTURE,
    head_norms=True,
    read_shape=read_shape,
    rules=(
        Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VocabularyRows()),
        Rule(_LAYER + "input_layernorm.weight", (_HF_LAYER + "input_layernorm.weight",), Replicated()),
        Rule(
            _LAYER + "self_attention.linear_qkv.weight",
            tuple(_HF_LAYER + f"self_attn.{name}.weight" for name in _PROJECTIONS),
            FusedQkv(),
        ),
        Rule(
            _LAYER + "self_attention.q_layernorm.weight",
            (_HF_LAYER + "self_attn.q_norm.weight",),
            Replicated(per_head=True),
        ),
        Rule(
            _LAYER + "self_attention.k_layernorm.weight",
            (_HF_LAYER + "self_attn.k_norm.weight",),
            Replicated(per_head=True),
        ),
        Rule(
            _LAYER + "self_attention.linear_proj.weight",
            (_HF_LAYER + "self_attn.o_proj.weight",),
            InputColumns(attention=True),
        ),
        Rule(_LAYER + "pre_mlp_layernorm.weight", (_HF_LAYER + "post_attention_layernorm.weight",), Replicated()),
        Rule(
            _LAYER + "mlp.linear_fc1.weight",
            (_HF_LAYER + "mlp.gate_proj.weight", _HF_LAYER + "mlp.up_proj.weight"),
            FusedGateUp(),
        ),
        Rule(
            _LAYER + "mlp.linear_fc2.weight",
            (_HF_LAYER + "mlp.down_proj.weight",),
            InputColumns(attention=False),
        ),
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated()),
        Rule("output_layer.weight", ("lm_head.weight",), VocabularyRows()),
    ),
)
