"""What a model folder says about its tensors, read from the headers of its files without loading them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rollout_server.engines.base import EngineError


def read_config(model_dir: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    return config


def tensor_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter; a tied output layer is its embedding and does not count."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes.update({name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"})
    if not shapes:
        raise EngineError(f"{model_dir} has no .safetensors file: its tensors' names and shapes are not known")
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
