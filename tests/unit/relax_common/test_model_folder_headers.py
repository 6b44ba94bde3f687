"""A model folder as controller and engines see it before anything is loaded: faults are found by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from relax_common.errors import InvalidInput
from relax_common.storage.model_folder import INDEX, SINGLE, check_vocabulary, weight_shapes
from rollout_server.engines.contract import EngineError
from rollout_server.engines.limits import end_token_ids
from rollout_server.engines.sglang.engine import tensor_shapes

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def weights() -> dict[str, Any]:
    return {"model.embed_tokens.weight": np.ones((6, 4), np.float32), "lm_head.weight": np.ones((6, 4), np.float32)}


def sharded(folder: Path) -> Path:
    for file, (name, tensor) in zip(SHARDS, weights().items(), strict=True):
        save_file({name: tensor}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict(zip(weights(), SHARDS, strict=True))}))
    (folder / "config.json").write_text("{}")
    return folder


def refused(folder: Path) -> str:
    """The same words from controller and engine."""
    with pytest.raises(InvalidInput) as caught:
        weight_shapes(folder)
    with pytest.raises(EngineError) as from_engine:
        tensor_shapes(folder)
    assert str(from_engine.value) == caught.value.message
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    assert len(weight_shapes(sharded(tmp_path))) == 2
    (tmp_path / SHARDS[1]).unlink()
    assert SHARDS[1] in refused(tmp_path)


def test_a_damaged_shard_or_index_is_named(tmp_path: Path) -> None:
    (sharded(tmp_path) / SHARDS[0]).write_bytes(b"\xff" * 12)
    assert f"{SHARDS[0]}: cut off" in refused(tmp_path)
    (tmp_path / INDEX).write_text("[]")
    assert "not a safetensors index" in refused(tmp_path)


def test_two_sets_of_weights_beside_each_other_are_ambiguous(tmp_path: Path) -> None:
    save_file({name: np.zeros_like(tensor) for name, tensor in weights().items()}, sharded(tmp_path) / SINGLE)
    assert "holds both model.safetensors and model.safetensors.index.json" in refused(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    assert "no .safetensors file" in refused(tmp_path)


def test_extra_state_is_no_weight(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file(weights() | {"model.layers.0.self_attn._extra_state": np.zeros(0, np.uint8)}, tmp_path / SINGLE)
    assert set(weight_shapes(tmp_path)) == set(weights()) == set(tensor_shapes(tmp_path))


def test_a_padded_vocabulary_is_refused_with_both_sizes(tmp_path: Path) -> None:
    check_vocabulary(tmp_path, {"lm_head.weight": (6, 4)}, 6)
    with pytest.raises(InvalidInput, match=r"lm_head.weight has shape \(8, 4\), but config.json says vocab_size = 6"):
        check_vocabulary(tmp_path, {"model.embed_tokens.weight": (6, 4), "lm_head.weight": (8, 4)}, 6)


TOKENIZER = {"added_tokens": [{"id": 4, "content": "<turn_end>"}], "model": {"vocab": {"<end>": 2}}}


@pytest.mark.parametrize(
    ("config", "generation", "eos_token", "expected"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": [4, 2]}, "<end>", {2, 4}),
        ({"eos_token_id": 2}, {"eos_token_id": [2]}, {"content": "<turn_end>"}, {2, 4}),
        ({"eos_token_id": None}, None, "<turn_end>", {4}),
        ({"eos_token_id": 7}, {}, "<unknown>", {7}),
        ({"eos_token_id": 7}, {}, None, {7}),
    ],
)
def test_generation_stops_at_every_end_token_that_any_file_names(
    tmp_path: Path, config: Mapping[str, Any], generation: Mapping[str, Any] | None, eos_token: Any, expected: set[int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    assert end_token_ids(tmp_path) == expected


def test_a_model_without_any_end_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError, match="names no eos_token_id"):
        end_token_ids(tmp_path)
