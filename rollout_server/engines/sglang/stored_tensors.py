"""What a model folder says about its tensors, read from the headers of its files without loading them."""

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from relax_common.errors import InvalidInput
from relax_common.json_types import JsonObject
from relax_common.storage.model_folder import weight_shapes
from rollout_server.engines.contract import EngineError


def read_config(model_dir: Path) -> JsonObject:
    config: JsonObject = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    return config


def tensor_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter; a tied output layer is its embedding and does not count."""
    try:
        shapes = weight_shapes(model_dir)
    except InvalidInput as error:
        raise EngineError(error.message) from error
    if read_config(model_dir).get("tie_word_embeddings", False):
        shapes.pop("lm_head.weight", None)
    return shapes


def check_tensors(expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    """SGLang skips names that it does not know and keeps old values for those that are missing: refuse both before."""
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        raise EngineError(f"the version's tensors are not the model's: missing {missing[:3]}, unknown {unknown[:3]}")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise EngineError(f"{name} is {tuple(tensors[name].shape)}, the model has {shape}")
