"""The sizes of a model, and how many elements a rank of it holds. From config.json alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_common.errors import InvalidInput
from relax_common.model_support import check_config


@dataclass(frozen=True)
class _Traits:
    qkv_bias: bool = False
    head_norms: bool = False


_ARCHITECTURES = {
    "LlamaForCausalLM": _Traits(),
    "Qwen2ForCausalLM": _Traits(qkv_bias=True),
    "Qwen3ForCausalLM": _Traits(head_norms=True),
    "Qwen3MoeForCausalLM": _Traits(head_norms=True),
}
SUPPORTED_ARCHITECTURES = tuple(_ARCHITECTURES)


@dataclass(frozen=True)
class ModelSizes:
    """With `experts`, each layer has that many feed-forwards of `ffn` channels; a token passes through
    `experts_per_token`."""

    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    experts: int
    experts_per_token: int
    tied: bool
    qkv_bias: bool
    head_norms: bool
    context: int | None

    @property
    def expert_elements(self) -> int:
        """Elements of all experts of all layers."""
        return self.layers * self.experts * self._feed_forward

    @property
    def elements(self) -> int:
        """Elements of the whole model; a tied output layer counts once."""
        return self.shared_elements(1) + self.expert_elements

    def shared_elements(self, tensor_parallel: int) -> int:
        """Elements that one tensor-parallel rank holds without experts, including the rows that pad the vocabulary."""
        vocabulary = -(-self.vocab // tensor_parallel) * self.hidden * (1 if self.tied else 2)
        qkv = (self.heads + 2 * self.kv_heads) * self.head_size
        split = qkv * self.hidden + self.heads * self.head_size * self.hidden + (qkv if self.qkv_bias else 0)
        norms = 2 * self.hidden + (2 * self.head_size if self.head_norms else 0)
        feed_forward = self.experts * self.hidden if self.experts else self._feed_forward // tensor_parallel
        return vocabulary + self.layers * (split // tensor_parallel + norms + feed_forward) + self.hidden

    @property
    def _feed_forward(self) -> int:
        return 3 * self.hidden * self.ffn


def read_model_config(folder: Path, key: str = "model.path") -> dict[str, Any]:
    """Reads config.json of a supported model. `key` is the recipe key that names the folder."""
    if not folder.is_dir():
        raise InvalidInput(f"{key} = {folder}: no such folder")
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except OSError as error:
        raise InvalidInput(f"{key} = {folder}: config.json: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{key} = {folder}: config.json is not valid JSON: {error}") from error
    names = config.get("architectures") or ["(none)"]
    if names[0] not in _ARCHITECTURES:
        raise InvalidInput(
            f"{key} = {folder}: architecture {names[0]} is not supported; supported: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    try:
        check_config(config, names[0])
    except InvalidInput as error:
        raise InvalidInput(f"{key} = {folder}: {error.message}") from error
    return config


def model_sizes(config: dict[str, Any]) -> ModelSizes:
    """Raises InvalidInput where a size is missing."""

    def size(*keys: str) -> int:
        found = next((config[key] for key in keys if isinstance(config.get(key), int)), None)
        if found is None:
            raise InvalidInput(f"config.json: `{keys[0]}` must be a number, found {config.get(keys[0])!r}")
        return int(found)

    traits = _ARCHITECTURES[config["architectures"][0]]
    has_experts = "Moe" in config["architectures"][0]
    heads, hidden = size("num_attention_heads"), size("hidden_size")
    return ModelSizes(
        layers=size("num_hidden_layers"),
        hidden=hidden,
        vocab=size("vocab_size"),
        heads=heads,
        kv_heads=size("num_key_value_heads", "num_attention_heads"),
        head_size=config.get("head_dim") or hidden // heads,
        ffn=size("moe_intermediate_size" if has_experts else "intermediate_size"),
        experts=size("num_experts", "num_local_experts") if has_experts else 0,
        experts_per_token=size("num_experts_per_tok") if has_experts else 0,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=traits.qkv_bias,
        head_norms=traits.head_norms,
        context=config.get("max_position_embeddings"),
    )


def tensor_shapes(sizes: ModelSizes) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face tensor of the model with its shape."""
    hidden, head = sizes.hidden, sizes.head_size
    queries, keys = sizes.heads * head, sizes.kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (sizes.vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not sizes.tied:
        shapes["lm_head.weight"] = (sizes.vocab, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
    }
    if sizes.qkv_bias:
        layer |= {
            f"self_attn.{name}_proj.bias": (rows,) for name, rows in zip("qkv", (queries, keys, keys), strict=True)
        }
    if sizes.head_norms:
        layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    if sizes.experts:
        layer["mlp.gate.weight"] = (sizes.experts, hidden)
    for prefix in [f"mlp.experts.{expert}." for expert in range(sizes.experts)] or ["mlp."]:
        layer |= {f"{prefix}{name}_proj.weight": (sizes.ffn, hidden) for name in ("gate", "up")}
        layer[f"{prefix}down_proj.weight"] = (hidden, sizes.ffn)
    for number in range(sizes.layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes
