"""Which models are supported, from config.json and the headers of the weights: one rule for planning and loading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_common.errors import InvalidInput

_DENSE = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}

FIXED: dict[str, dict[str, object]] = {
    "LlamaForCausalLM": {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_interleaved": False,
    },
    "Qwen2ForCausalLM": {"hidden_act": "silu", "use_sliding_window": False},
    "Qwen3ForCausalLM": _DENSE,
    "Qwen3MoeForCausalLM": _DENSE | {"decoder_sparse_step": 1, "mlp_only_layers": []},
}
"""By architecture: keys of config.json and their only supported value, which is also the default if the key is
missing."""


def check_config(config: Mapping[str, Any], architecture: str) -> None:
    """Raises InvalidInput, in one line, for a model that loading would refuse half a minute later."""
    for key, supported in FIXED[architecture].items():
        if config.get(key, supported) != supported:
            raise InvalidInput(f"config.json: {architecture} with {key}={config[key]!r} is not supported")
    check_rope(config)
    if architecture == "Qwen3MoeForCausalLM" and config.get("norm_topk_prob") is not True:
        raise InvalidInput(f"config.json: {architecture} is supported with norm_topk_prob = true only")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads and heads % kv_heads:
        raise InvalidInput(f"config.json: {heads} attention heads are not a multiple of {kv_heads} KV heads")


def check_rope(config: Mapping[str, Any]) -> None:
    """Accepts only plain RoPE, from `rope_parameters` (newer files) or `rope_scaling` (older ones)."""
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    variant = nested.get("rope_type", nested.get("type", "default"))
    if variant != "default":
        raise InvalidInput(f"config.json: rope variant {variant!r} is not supported; only 'default' is")


def check_shapes(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], where: object, *, tied: bool
) -> None:
    """Exactly the expected tensors, each of its shape; a tied model may repeat its embedding as output layer."""
    missing = sorted(set(expected) - set(found))
    if missing:
        raise InvalidInput(f"{where}: tensor {missing[0]} is missing ({len(missing)} missing in all)")
    repeated = {"lm_head.weight"} if tied else set()
    unknown = sorted(set(found) - set(expected) - repeated)
    if unknown:
        raise InvalidInput(
            f"{where}: tensor {unknown[0]} does not belong to the architecture in config.json ({len(unknown)} such "
            "tensors)"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise InvalidInput(f"{where}: tensor {name} has shape {found[name]}, expected {shape}")
