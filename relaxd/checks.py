"""What is refused before anything starts: checkpoint, layout, data, prompts. One line each, without torch."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from relax_common.errors import InvalidInput
from relax_common.model_folder import weight_shapes
from relax_common.recipe import Derived, Recipe, derive
from relax_common.recipe.derived import PARAMETER_BYTES
from relaxd.data import Prompts, read_prompts
from relaxd.data.lengths import fit_lengths
from relaxd.data.prompts import source_name

_FIND_SGLANG = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"
_FIND_SECONDS = 30.0

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


def check_recipe(recipe: Recipe) -> tuple[Derived, Prompts]:
    """Everything a run would trip over later. Raises InvalidInput."""
    derived = derive(recipe)
    config = read_model_config(recipe.model.path)
    check_layout(recipe.actor.tensor_parallel_size, "actor", config)
    check_experts(recipe, config)
    check_context(recipe, config)
    for role in derived.forward_roles:
        folder = Path(role.model_path) if role.model_path else recipe.model.path
        check_layout(role.tensor_parallel_size, role.name, read_model_config(folder))
    check_dcs_budget(recipe)
    check_engine(recipe)
    prompts = fit_lengths(recipe, read_prompts(recipe.data))
    if recipe.data.passes:
        groups = len(prompts.rows) * recipe.data.passes
        if groups < recipe.prompts_per_step:
            raise InvalidInput(
                f"{source_name(recipe.data)}: {len(prompts.rows)} rows x {recipe.data.passes} passes do not fill one "
                f"step of {recipe.prompts_per_step} prompts; lower prompts_per_step or raise data.passes"
            )
    return derived, prompts


def check_dcs_budget(recipe: Recipe) -> None:
    """dcs holds three versions (head, the one before, the one being pushed) and two states of every rank; one of
    each besides while a checkpoint is written."""
    elements = sum(map(math.prod, weight_shapes(recipe.model.path).values()))
    version_bytes = elements * PARAMETER_BYTES[recipe.model.dtype]
    state_bytes = elements * 12  # fp32 parameters and two moments
    saving = int(recipe.checkpoint.every_steps > 0)
    versions, states = 3 + saving, 2 + saving
    needed = versions * version_bytes + states * state_bytes
    if needed > recipe.dcs.memory_budget_bytes:
        raise InvalidInput(
            f"dcs.memory_budget_bytes = {recipe.dcs.memory_budget_bytes} cannot hold {versions} versions x "
            f"{version_bytes} + {states} states x {state_bytes} = {needed} bytes of {elements} parameters; raise it"
        )


def check_engine(recipe: Recipe) -> None:
    """That the interpreter of a managed SGLang has it; a URL is asked by the rollout server that uses it."""
    if recipe.rollout.engine != "sglang" or recipe.rollout.engine_urls:
        return
    python = recipe.rollout.engine_python or sys.executable
    remedy = "`make sglang` installs it into .venv-sglang; name that one's bin/python, or use engine = 'torch'"
    try:
        found = subprocess.run([python, "-c", _FIND_SGLANG], capture_output=True, timeout=_FIND_SECONDS, check=False)
    except OSError as error:
        raise InvalidInput(f"rollout.engine_python = {python}: {error.strerror}; {remedy}") from error
    except subprocess.TimeoutExpired as error:
        raise InvalidInput(f"rollout.engine_python = {python}: no answer within {_FIND_SECONDS:.0f} s") from error
    if found.returncode != 0:
        raise InvalidInput(f"rollout.engine = 'sglang', but {python} has no sglang: {remedy}")


def read_model_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise InvalidInput(f"model.path = {folder}: no such folder")
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except OSError as error:
        raise InvalidInput(f"model.path = {folder}: config.json: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise InvalidInput(f"model.path = {folder}: config.json is not valid JSON: {error}") from error
    if not list(folder.glob("*.safetensors")):
        raise InvalidInput(f"model.path = {folder}: no .safetensors file")
    names = config.get("architectures") or ["(none)"]
    if names[0] not in SUPPORTED_ARCHITECTURES:
        raise InvalidInput(
            f"model.path = {folder}: architecture {names[0]} is not supported; supported: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return config


def experts_of(config: dict[str, Any]) -> int:
    """Experts a layer; 0 for a dense model. Newer files call them local ones."""
    return int(config.get("num_experts", config.get("num_local_experts", 0)))


def check_experts(recipe: Recipe, config: dict[str, Any]) -> None:
    size, ranks, experts = recipe.actor.expert_parallel_size, recipe.actor.data_parallel_size, experts_of(config)
    if size == 1:
        return
    if not experts:
        raise InvalidInput(f"actor.expert_parallel_size = {size}: the model has no experts; use data parallelism")
    for what, count in ((f"the model's {experts} experts", experts), (f"actor.data_parallel_size = {ranks}", ranks)):
        if count % size:
            raise InvalidInput(f"actor.expert_parallel_size = {size} does not divide {what}")


def check_layout(tp: int, section: str, config: dict[str, Any]) -> None:
    """What Megatron would refuse later. `section` is the role whose size it is."""
    if tp > 1 and experts_of(config):
        raise InvalidInput(
            f"{section}.tensor_parallel_size = {tp}: a model with experts is divided by actor.expert_parallel_size, "
            "not by tensor parallelism"
        )
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    for what, size in (("attention heads", heads), ("key-value heads", kv_heads), ("ffn", config["intermediate_size"])):
        if size % tp:
            raise InvalidInput(
                f"{section}.tensor_parallel_size = {tp} does not divide the model's {size} {what}; use data parallelism"
            )


def check_context(recipe: Recipe, config: dict[str, Any]) -> None:
    context = config.get("max_position_embeddings")
    row = derive(recipe).tokens_per_row_max
    if context and row > context:
        raise InvalidInput(
            f"data.prompt_tokens_max + sampling.max_new_tokens = {row} exceeds the model's context of {context} tokens"
        )
