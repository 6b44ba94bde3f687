"""What the trainer accepts as a model, and one clear line for what it does not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from relaxd.plan.model import SUPPORTED_ARCHITECTURES
from trainer_server.model import families as trainer_families
from trainer_server.model.hf_config import ModelError
from trainer_server.model.layouts import GroupRank, Place, padded_vocab_size
from trainer_server.model.load import read_name_map
from trainer_server.model.mapping import NameMap
from trainer_server.model.safetensors_folder import INDEX, SINGLE, open_folder

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def _folder(path: Path, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    return path


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "llama": {"architectures": ["LlamaForCausalLM"], "head_dim": None, "tie_word_embeddings": True},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "norm_topk_prob": True,
    },
}
# Tensor- and expert-parallel sizes.
LAYOUTS = [(family, tp, 1) for family in FAMILIES for tp in (1, 2) if family != "qwen3_moe"]
LAYOUTS += [("qwen3_moe", 1, ep) for ep in (1, 2, 4)]


def _weights(names: NameMap) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in names.hf_shapes().items()}


def _refused(call: Any, *args: Any) -> str:
    with pytest.raises(ModelError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}}, "linear"),
        ({"rope_scaling": {"type": "dynamic"}}, "dynamic"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": "8"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"architectures": ["LlamaForCausalLM"], "mlp_bias": True}, "mlp_bias"),
        ({"architectures": ["LlamaForCausalLM"], "rope_interleaved": True}, "rope_interleaved"),
        ({"architectures": ["LlamaForCausalLM"], "rope_scaling": {"rope_type": "llama3"}}, "llama3"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "use_sliding_window"),
        (FAMILIES["qwen3_moe"] | {"norm_topk_prob": False}, "norm_topk_prob"),
        (FAMILIES["qwen3_moe"] | {"mlp_only_layers": [1]}, "mlp_only_layers"),
        (FAMILIES["qwen3_moe"] | {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (FAMILIES["qwen3_moe"] | {"num_experts": None}, "num_experts"),
        (FAMILIES["qwen3_moe"] | {"num_experts_per_tok": 5}, "5 of 4 experts"),
        ({"architectures": ["LlamaForCausalLM"], "head_dim": None, "num_attention_heads": 6}, "hidden_size 8"),
    ],
)
def test_unsupported_configuration_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    assert named in _refused(read_name_map, _folder(tmp_path / "m", **changes))


def test_what_relaxd_accepts_is_what_the_trainer_can_load() -> None:
    assert {family.architecture for family in trainer_families.FAMILIES} == set(SUPPORTED_ARCHITECTURES)


def test_missing_folder_and_missing_config_are_named(tmp_path: Path) -> None:
    assert "does not exist" in _refused(read_name_map, tmp_path / "absent")
    assert "config.json" in _refused(read_name_map, tmp_path)


def test_rope_base_is_found_in_both_places(tmp_path: Path) -> None:
    assert read_name_map(_folder(tmp_path / "old", rope_scaling=None)).shape.rope_base == 5000.0
    nested = _folder(tmp_path / "new", rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    assert read_name_map(nested).shape.rope_base == 77.0


@pytest.mark.parametrize("tensor_parallel", [3, 4])
def test_heads_that_do_not_divide_are_refused(tmp_path: Path, tensor_parallel: int) -> None:
    shape = read_name_map(_folder(tmp_path)).shape
    assert f"tensor_parallel={tensor_parallel}" in _refused(shape.check_layout, tensor_parallel)


def test_experts_are_divided_by_expert_parallelism_alone(tmp_path: Path) -> None:
    experts = read_name_map(_folder(tmp_path, **FAMILIES["qwen3_moe"])).shape
    experts.check_layout(1, 4)
    assert "need tensor_parallel=1" in _refused(experts.check_layout, 2)
    assert "4 experts cannot be divided among expert_parallel=3" in _refused(experts.check_layout, 1, 3)
    dense = read_name_map(_folder(tmp_path)).shape
    assert "0 experts" in _refused(dense.check_layout, 1, 2)


def test_weights_are_checked_before_loading(tmp_path: Path) -> None:
    names = read_name_map(_folder(tmp_path))
    tensors = _weights(names)
    shapes = names.hf_shapes()
    save_file(tensors | {"model.layers.0.mlp._extra_state": torch.zeros(1)}, tmp_path / SINGLE)
    open_folder(tmp_path).check(shapes)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / SINGLE)
    assert f"{name} is missing" in _refused(open_folder(tmp_path).check, shapes)
    save_file(tensors | {name: torch.zeros(12, 9)}, tmp_path / SINGLE)
    assert "(12, 9), expected (12, 8)" in _refused(open_folder(tmp_path).check, shapes)
    save_file(tensors | {"model.visual.weight": torch.zeros(1)}, tmp_path / SINGLE)
    assert "model.visual.weight does not belong" in _refused(open_folder(tmp_path).check, shapes)
    (tmp_path / SINGLE).write_bytes(b"not safetensors")
    assert "not a readable safetensors file" in _refused(open_folder, tmp_path)


def test_sharded_folder_and_its_faults(tmp_path: Path) -> None:
    names = read_name_map(_folder(tmp_path))
    tensors = _weights(names)
    assert SINGLE in _refused(open_folder, tmp_path)
    halves = (sorted(tensors)[::2], sorted(tensors)[1::2])
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for file, half in zip(files, halves, strict=True):
        save_file({name: tensors[name] for name in half}, tmp_path / file)
    weight_map = {name: file for file, half in zip(files, halves, strict=True) for name in half}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    folder = open_folder(tmp_path)
    folder.check(names.hf_shapes())

    save_file(tensors, tmp_path / SINGLE)
    assert "holds both" in _refused(open_folder, tmp_path)
    (tmp_path / SINGLE).unlink()
    (tmp_path / files[1]).unlink()
    assert files[1] in _refused(open_folder, tmp_path)
    (tmp_path / INDEX).write_text("{")
    assert "not a safetensors index" in _refused(open_folder, tmp_path)


def _megatron_shapes(names: NameMap, tp: int, ep: int) -> dict[str, tuple[int, ...]]:
    s = names.shape
    feed_forward = {
        "linear_fc1.weight": (2 * s.ffn_size // tp, s.hidden_size),
        "linear_fc2.weight": (s.hidden_size, s.ffn_size // tp),
    }
    experts = [f"mlp.experts.local_experts.{index}." for index in range(s.experts // ep)]
    qkv = (s.heads + 2 * s.kv_heads) * s.head_size // tp
    head_norms = {
        "self_attention.q_layernorm.weight": (s.head_size,),
        "self_attention.k_layernorm.weight": (s.head_size,),
    }
    layer = {
        "input_layernorm.weight": (s.hidden_size,),
        "self_attention.linear_qkv.weight": (qkv, s.hidden_size),
        "self_attention.linear_proj.weight": (s.hidden_size, s.heads * s.head_size // tp),
        **(head_norms if names.family.head_norms else {}),
        **({"self_attention.linear_qkv.bias": (qkv,)} if names.family.qkv_bias else {}),
        "pre_mlp_layernorm.weight": (s.hidden_size,),
        **({"mlp.router.weight": (s.experts, s.hidden_size)} if s.experts else {}),
        **{prefix + name: shape for prefix in experts or ["mlp."] for name, shape in feed_forward.items()},
    }
    vocabulary = (padded_vocab_size(s.vocab_size, tp) // tp, s.hidden_size)
    shapes = {"embedding.word_embeddings.weight": vocabulary}
    if not s.tied_embeddings:
        shapes["output_layer.weight"] = vocabulary
    shapes |= {f"decoder.layers.{i}.{n}": shape for i in range(s.layers) for n, shape in layer.items()}
    return shapes | {"decoder.final_layernorm.weight": (s.hidden_size,)}


@pytest.mark.parametrize(("family", "tp", "ep"), LAYOUTS)
def test_slices_of_all_ranks_tile_every_hugging_face_tensor_once(tmp_path: Path, family: str, tp: int, ep: int) -> None:
    names = read_name_map(_folder(tmp_path, **FAMILIES[family]))
    covered = {name: torch.zeros(shape) for name, shape in names.hf_shapes().items()}
    for rank in range(tp * ep):
        place = Place(GroupRank(rank % tp, tp), GroupRank(rank // tp, ep))
        for name, shape in _megatron_shapes(names, tp, ep).items():
            for entry in names.slices_of(name, torch.zeros(shape), place):
                assert entry.piece.full_shape == tuple(covered[entry.hf_name].shape)
                at = tuple(slice(s, s + e) for s, e in zip(entry.piece.start, entry.piece.extent, strict=True))
                covered[entry.hf_name][at] += 1 / (1 if entry.of_expert else ep * tp if entry.replicated else ep)
    assert all(bool((count == 1).all()) for count in covered.values())


@pytest.mark.parametrize(("family", "tp", "ep"), LAYOUTS)
def test_filling_and_reading_a_slice_are_inverse(tmp_path: Path, family: str, tp: int, ep: int) -> None:
    names = read_name_map(_folder(tmp_path, **FAMILIES[family]))
    tensors = _weights(names)
    for rank in range(tp * ep):
        place = Place(GroupRank(rank % tp, tp), GroupRank(rank // tp, ep))
        for name, shape in _megatron_shapes(names, tp, ep).items():
            parameter = torch.full(shape, float("nan"))
            entries = names.slices_of(name, parameter, place)
            for entry in entries:
                at = tuple(slice(s, s + e) for s, e in zip(entry.piece.start, entry.piece.extent, strict=True))
                entry.fill(tensors[entry.hf_name][at])
                assert torch.equal(entry.tensor(), tensors[entry.hf_name][at])
            filled = sum(entry.tensor().numel() for entry in entries)
            assert int((~parameter.isnan()).sum()) == filled


def test_fused_qkv_keeps_each_kv_head_with_its_queries(tmp_path: Path) -> None:
    names = read_name_map(_folder(tmp_path))
    rows = torch.arange(32.0)[:, None].expand(32, 8).clone()
    entries = names.slices_of("decoder.layers.0.self_attention.linear_qkv.weight", rows, Place())
    found = {entry.hf_name.split(".")[-2]: entry.tensor()[:, 0].tolist() for entry in entries}
    # Per KV head of 4 channels: two query heads (8 rows), key (4), value (4).
    assert found["q_proj"] == [float(i) for i in (*range(0, 8), *range(16, 24))]
    assert found["k_proj"] == [float(i) for i in (*range(8, 12), *range(24, 28))]
    assert found["v_proj"] == [float(i) for i in (*range(12, 16), *range(28, 32))]


def test_unknown_megatron_parameter_is_refused(tmp_path: Path) -> None:
    names = read_name_map(_folder(tmp_path))
    assert "decoder.layers.0.mlp.router.weight" in _refused(
        names.slices_of, "decoder.layers.0.mlp.router.weight", torch.zeros(1), Place()
    )
