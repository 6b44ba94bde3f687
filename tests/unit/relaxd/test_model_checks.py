"""What `--dry-run` finds in a model folder, which the actor or an engine would find half a minute later."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from relax_common.errors import InvalidInput
from relaxd.plan.checks import check_weights
from relaxd.plan.model import model_sizes, tensor_shapes
from trainer_server.model.hf_config import ModelError
from trainer_server.model.load import read_name_map

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 16,
    "intermediate_size": 24,
    "vocab_size": 10,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MOE = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "norm_topk_prob": True,
}
Tensors = dict[str, np.ndarray]


def model(folder: Path, config: dict[str, Any], change: Callable[[Tensors], object] = lambda _: None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    shapes = tensor_shapes(model_sizes(config))
    tensors = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        MOE,
        CONFIG | {"tie_word_embeddings": True},
        CONFIG | {"architectures": ["LlamaForCausalLM"]},
        CONFIG | {"architectures": ["Qwen2ForCausalLM"]},
    ],
)
def test_the_plan_expects_the_tensors_that_the_trainer_loads(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = model(tmp_path, config)
    check_weights(folder)
    assert read_name_map(folder).hf_shapes() == tensor_shapes(model_sizes(config))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope variant 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope variant 'llama3' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"num_attention_heads": 3}, "3 attention heads are not a multiple of 2 KV heads"),
    ],
)
def test_an_unsupported_model_is_named_by_plan_and_trainer_alike(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    folder = model(tmp_path, CONFIG)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(InvalidInput, match=says):
        check_weights(folder)
    with pytest.raises(ModelError, match=says):
        read_name_map(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("model.norm.weight"), r"tensor model\.norm\.weight is missing"),
        (lambda t: t.update({"extra": np.zeros(1, np.float32)}), "tensor extra does not belong"),
        (
            lambda t: t.update({"lm_head.weight": np.zeros((12, 16), np.float32)}),
            r"lm_head\.weight has shape \(12, 16\), expected \(10, 16\)",
        ),
    ],
)
def test_tensors_that_do_not_follow_from_the_config_are_named(
    tmp_path: Path, change: Callable[[Tensors], object], says: str
) -> None:
    with pytest.raises(InvalidInput, match=says):
        check_weights(model(tmp_path, CONFIG, change))


def repeated(difference: float) -> Callable[[Tensors], object]:
    return lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + np.float32(difference)})


def test_a_tied_model_may_repeat_its_embedding_and_nothing_else(tmp_path: Path) -> None:
    tied = CONFIG | {"tie_word_embeddings": True}
    check_weights(model(tmp_path, tied, repeated(0.0)))
    with pytest.raises(InvalidInput, match=r"the stored lm_head\.weight differs from model\.embed_tokens\.weight"):
        check_weights(model(tmp_path, tied, repeated(1e-3)))
    check_weights(model(tmp_path, CONFIG, repeated(1e-3)))  # untied, both are what they are
