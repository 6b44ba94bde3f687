"""What the trainer needs to know of a Hugging Face `config.json`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = dict[str, Any]
"""The content of a config.json."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes. `max_positions` is in tokens, `rope_base` is the theta of plain RoPE.

    With `experts`, each layer has that many feed-forwards of `ffn_size`, and a token passes through `experts_per_token`
    of them.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    norm_epsilon: float
    rope_base: float
    max_positions: int
    tied_embeddings: bool
    experts: int = 0
    experts_per_token: int = 0

    def check_layout(self, tensor_parallel: int, expert_parallel: int = 1) -> None:
        if self.experts and tensor_parallel > 1:
            raise ModelError(f"{self.architecture}: experts need tensor_parallel=1; split them by expert_parallel")
        if expert_parallel > 1 and (not self.experts or self.experts % expert_parallel):
            raise ModelError(
                f"{self.architecture}: {self.experts} experts cannot be divided among expert_parallel={expert_parallel}"
            )
        for noun, count in (("attention heads", self.heads), ("KV heads", self.kv_heads)):
            if count % tensor_parallel:
                raise ModelError(
                    f"{self.architecture}: {count} {noun} cannot be split over tensor_parallel={tensor_parallel}; "
                    f"choose a tensor_parallel that divides {count}"
                )
        if self.ffn_size % tensor_parallel:
            raise ModelError(
                f"{self.architecture}: intermediate_size {self.ffn_size} is not divisible by "
                f"tensor_parallel={tensor_parallel}"
            )


def read_config(folder: Path) -> Config:
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(f"checkpoint folder {folder} does not exist")
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json, so it is not a Hugging Face checkpoint folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(config).__name__}")
    return config


def architecture_of(config: Config) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelError(f"config.json: `architectures` must name exactly one architecture, found {names!r}")
    return names[0]


def required(config: Config, key: str, kind: type) -> Any:
    value = config.get(key)
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ModelError(f"config.json: `{key}` must be {kind.__name__}, found {value!r}")
    return kind(value)


def plain_rope_base(config: Config, default: float) -> float:
    """Theta of unscaled RoPE, from `rope_parameters` (newer files) or the top level (older ones)."""
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    variant = nested.get("rope_type", nested.get("type", "default"))
    if variant != "default":
        raise ModelError(f"config.json: rope variant {variant!r} is not supported; only 'default' is")
    theta = nested.get("rope_theta", config.get("rope_theta", default))
    if not isinstance(theta, int | float) or isinstance(theta, bool) or theta <= 0:
        raise ModelError(f"config.json: rope_theta must be a positive number, found {theta!r}")
    return float(theta)


class ModelError(ValueError):
    """A model folder, configuration or layout that cannot be used."""
