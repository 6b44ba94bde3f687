"""AdamW by Megatron's distributed optimizer."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides

from relax_common.recipe import Derived, Recipe
from trainer_server.megatron.schedule import LearningRate
from trainer_server.model.hf_config import ModelError


@dataclass(frozen=True)
class AdamWOptions:
    learning_rate: LearningRate
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0  # of the whole gradient


def optimizer_of(recipe: Recipe, derived: Derived, lr: float = 0.0) -> AdamWOptions:
    """`lr`: another rate than the actor's, with the same schedule."""
    section = recipe.optimizer
    scale = lr / section.lr if lr else 1.0
    return AdamWOptions(
        learning_rate=LearningRate(
            peak=section.lr * scale,
            warmup_updates=section.warmup_updates,
            shape=section.schedule,
            total_updates=derived.decay_updates,
            floor=section.lr_min * scale,
        ),
        beta1=section.adam_beta1,
        beta2=section.adam_beta2,
        epsilon=section.adam_eps,
        weight_decay=section.weight_decay,
        clip_norm=section.clip_grad_norm,
    )


@dataclass(frozen=True)
class MainShard:
    """The fp32 elements [start, stop) of one parameter that this data-parallel rank updates."""

    parameter: torch.nn.Parameter
    start: int
    stop: int
    main: torch.Tensor
    adam: dict[str, torch.Tensor]


def build_optimizer(options: AdamWOptions, model: Any, dtype: torch.dtype) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        lr=options.learning_rate.peak,
        weight_decay=options.weight_decay,
        adam_beta1=options.beta1,
        adam_beta2=options.beta2,
        adam_eps=options.epsilon,
        clip_grad=options.clip_norm,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        log_num_zeros_in_grad=False,
    )
    optimizer = get_megatron_optimizer(config, [model], config_overrides=get_standard_config_overrides(config))
    for part in _parts(optimizer):
        if not isinstance(part.optimizer, torch.optim.AdamW):
            raise ModelError(
                f"Megatron took Adam from {type(part.optimizer).__module__}, which keeps its step count where no "
                "recovery state looks: use an environment without Transformer Engine and Apex"
            )
    for shard in main_shards(optimizer):
        _create_adam_state(shard)
    return optimizer


def _parts(optimizer: Any) -> list[Any]:
    """One for the parameters that all data-parallel ranks hold, one for experts."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def main_shards(optimizer: Any) -> Iterator[MainShard]:
    for part in _parts(optimizer):
        inner = part.optimizer
        for parameter, (group, order) in part.model_param_group_index_map.items():
            main = inner.param_groups[group]["params"][order]
            owned = part._get_model_param_range_map(parameter)["param"]
            yield MainShard(parameter, owned.start, owned.end, main, inner.state[main])


def _create_adam_state(shard: MainShard) -> None:
    # Adam creates it in its first step. It is created here so that a state saved before that step has the same form.
    shard.adam["step"] = torch.zeros((), dtype=torch.float32)
    shard.adam["exp_avg"] = torch.zeros_like(shard.main)
    shard.adam["exp_avg_sq"] = torch.zeros_like(shard.main)


def publish_main_to_model(optimizer: Any, model: Any) -> None:
    """Call after the main shards were written: fills the model's parameters from all data-parallel ranks."""
    with torch.no_grad():
        for part in _parts(optimizer):
            part._copy_main_params_to_model_params()
        model.start_param_sync(force_sync=True)
