"""Bytes by rank, engine and service. Numbers are exact unless they are called an estimate."""

from __future__ import annotations

from dataclasses import dataclass

from relax_common.recipe import Derived, Recipe
from relax_common.recipe.derived import PARAMETER_BYTES
from relaxd.plan.model import ModelSizes

# Gradients are summed in fp32; so are the optimizer's own weights and its two moments.
FP32 = 4
# What a rank or an engine needs in addition to tensors: contexts, communication buffers, fragments.
RESERVED_BYTES = 4_000_000_000
# Share of device memory that SGLang gives to weights and cache if the recipe does not set mem_fraction_static.
ENGINE_FRACTION = 0.85
# A logit in fp32, its weight in the softmax, and a flag whether that weight is 0.
LOSS_BYTES_PER_LOGIT = FP32 + FP32 + 1


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one trainer rank. `activations` is an estimate for a full micro-batch."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    reserved: int = RESERVED_BYTES

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.reserved


def actor_rank_bytes(recipe: Recipe, model: ModelSizes) -> RankBytes:
    """Parameters of experts are shared out by expert parallelism, all others by tensor parallelism; optimizer weights
    and moments over the data-parallel ranks that hold the same parameters. In fp32 the parameters are those weights."""
    actor, dtype_bytes = recipe.actor, PARAMETER_BYTES[recipe.model.dtype]
    shared = model.shared_elements(actor.tensor_parallel_size)
    experts = model.expert_elements // actor.expert_parallel_size
    copies = actor.data_parallel_size // actor.expert_parallel_size
    owned = -(-shared // actor.data_parallel_size) + -(-experts // copies)
    return RankBytes(
        parameters=(shared + experts) * dtype_bytes,
        gradients=(shared + experts) * FP32,
        optimizer=owned * (2 if recipe.model.dtype == "float32" else 3) * FP32,
        activations=activation_bytes(recipe, model, actor.tokens_per_microbatch),
    )


def forward_rank_bytes(recipe: Recipe, model: ModelSizes, tensor_parallel: int) -> RankBytes:
    """Bytes of a role without a backward pass: it keeps one layer's activations at a time, and the logits."""
    dtype_bytes, tokens = PARAMETER_BYTES[recipe.model.dtype], recipe.actor.tokens_per_microbatch
    elements = model.shared_elements(tensor_parallel) + model.expert_elements
    activations = tokens * (
        _layer_channels(model, tensor_parallel) * dtype_bytes + _logit_bytes(model, tensor_parallel, dtype_bytes)
    )
    return RankBytes(elements * dtype_bytes, 0, 0, activations)


def critic_rank_bytes(recipe: Recipe, model: ModelSizes, tensor_parallel: int) -> RankBytes:
    """Bytes of a trained role with one data-parallel rank."""
    dtype_bytes = PARAMETER_BYTES[recipe.model.dtype]
    elements = model.shared_elements(tensor_parallel) + model.expert_elements
    return RankBytes(
        parameters=elements * dtype_bytes,
        gradients=elements * FP32,
        optimizer=elements * (2 if recipe.model.dtype == "float32" else 3) * FP32,
        activations=activation_bytes(recipe, model, recipe.actor.tokens_per_microbatch),
    )


def activation_bytes(recipe: Recipe, model: ModelSizes, tokens: int) -> int:
    """Estimate of what a micro-batch keeps for its backward pass, and of its loss."""
    dtype_bytes, tp = PARAMETER_BYTES[recipe.model.dtype], recipe.actor.tensor_parallel_size
    layer = _layer_channels(model, tp)
    kept = model.layers * model.hidden + layer if recipe.actor.recompute == "full" else model.layers * layer
    return tokens * (kept * dtype_bytes + _logit_bytes(model, tp, dtype_bytes))


def _layer_channels(model: ModelSizes, tp: int) -> int:
    """Per token: inputs and outputs of two norms and of the two halves of a layer; queries, keys and values as
    projected, after norm and rotation, and gathered by length; attention's output twice; gate and up, the activated
    gate, their product. With experts, also the product times its weight, and a copy of the token to and from each
    expert it passes through."""
    attention = 5 * (model.heads + model.kv_heads) * model.head_size // tp
    if model.experts:
        feed_forward = model.experts_per_token * (5 * model.ffn + 2 * model.hidden)
    else:
        feed_forward = 4 * model.ffn // tp
    return 6 * model.hidden + attention + feed_forward


def _logit_bytes(model: ModelSizes, tp: int, dtype_bytes: int) -> int:
    """Per token."""
    return -(-model.vocab // tp) * (dtype_bytes + LOSS_BYTES_PER_LOGIT)


@dataclass(frozen=True)
class EngineRoom:
    """Per device of a rollout server: the bytes of weights, and the tokens of key-value cache for which room is
    left."""

    devices: int
    memory_fraction: float
    weights: int
    cache: int
    cache_per_token: int

    @property
    def cache_tokens(self) -> int:
        return max(0, self.cache) // self.cache_per_token


def engine_room(recipe: Recipe, model: ModelSizes) -> EngineRoom | None:
    """None if no engine is started on a device."""
    devices, memory = recipe.rollout.devices_per_server, recipe.placement.gpu_memory_bytes
    if not devices or not recipe.placement.gpus_per_host:
        return None
    dtype_bytes = PARAMETER_BYTES[recipe.model.dtype]
    fraction = float(recipe.rollout.engine_options.get("mem_fraction_static", ENGINE_FRACTION))
    weights = model.elements * dtype_bytes // devices
    kv_heads = max(model.kv_heads // devices, 1)
    return EngineRoom(
        devices=devices,
        memory_fraction=fraction,
        weights=weights,
        cache=int(memory * fraction) - weights,
        cache_per_token=2 * model.layers * kv_heads * model.head_size * dtype_bytes,
    )


@dataclass(frozen=True)
class DcsBytes:
    """dcs holds three versions (head, the one before, the one being pushed) and two states of every rank, and one more
    of each while a checkpoint is written."""

    version: int
    versions: int
    state: int
    states: int

    @property
    def total(self) -> int:
        return self.version * self.versions + self.state * self.states


def dcs_bytes(recipe: Recipe, derived: Derived, model: ModelSizes) -> DcsBytes:
    saving = int(recipe.checkpoint.every_steps > 0)
    ranks = recipe.actor.tensor_parallel_size * model.shared_elements(recipe.actor.tensor_parallel_size)
    return DcsBytes(
        version=model.elements * PARAMETER_BYTES[recipe.model.dtype],
        versions=3 + saving,
        state=(ranks + model.expert_elements) * 3 * FP32 * (1 + sum(role.trained for role in derived.column_roles)),
        states=2 + saving,
    )
