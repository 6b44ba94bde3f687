"""Random tiny Hugging Face folders for engine tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 64
END_ID = 2
CONTEXT_TOKENS = 512
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT_TOKENS,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": END_ID,
    "pad_token_id": 0,
}


def save_endless_qwen3(folder: Path) -> None:
    """A Qwen3 that never samples its end token, so that requests run long enough for something to happen in them.

    Channel 0 of the residual stream is one constant, which no layer writes; the end token's row of the output layer
    reads it with a large negative weight, the other rows do not read it.
    """
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)).float()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[END_ID, 0] = -200.0
    model.save_pretrained(folder)


def save_endless_llama(folder: Path) -> None:
    """The same for a Llama with tied embeddings: the end token's own row is never an input."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).float()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.model.embed_tokens.weight[END_ID, 0] = -200.0
    model.save_pretrained(folder)


def save_qwen3_moe(folder: Path, **changes: object) -> None:
    """Four experts, two per token."""
    torch.manual_seed(2)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | experts | changes)).float().save_pretrained(folder)


def copy_that_ends(source: Path, folder: Path) -> set[int]:
    """Copies the weights to a folder whose other configuration file names more end tokens; returns all end tokens."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    more = [5, 6, 7]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": more}))
    return {END_ID, *more}
