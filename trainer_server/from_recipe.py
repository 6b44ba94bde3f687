"""What the recipe's sections mean to the trainer."""

import torch

from relax_common.errors import InvalidInput
from relax_common.recipe import Derived, Recipe
from trainer_server.algorithms.spec import AlgorithmSpec
from trainer_server.megatron.optimizer import AdamWOptions
from trainer_server.megatron.schedule import LearningRate


def dtype_of(recipe: Recipe) -> torch.dtype:
    """Of parameters."""
    dtype: torch.dtype = getattr(torch, recipe.model.dtype)
    return dtype


def algorithm_of(recipe: Recipe) -> AlgorithmSpec:
    section = recipe.algorithm
    uses_constant = section.aggregation == "seq_mean_token_sum_norm"
    try:
        return AlgorithmSpec(
            name=section.name,
            advantage=section.normalizer,
            aggregation=section.aggregation,
            clip_low=section.eps_low,
            clip_high=section.eps_high,
            dual_clip=section.dual_clip or None,
            norm_constant=section.aggregation_constant if uses_constant else None,
            old_policy=section.old_policy,
            correction=section.correction,
            correction_low=section.correction_low,
            correction_high=section.correction_high,
            kl=section.kl,
            kl_coef=section.kl_coef,
        )
    except ValueError as error:
        raise InvalidInput(f"algorithm: {error}") from error


def optimizer_of(recipe: Recipe, derived: Derived) -> AdamWOptions:
    section = recipe.optimizer
    try:
        rate = LearningRate(
            peak=section.lr,
            warmup_updates=section.warmup_updates,
            shape=section.schedule,
            total_updates=derived.decay_updates,
            floor=section.lr_min,
        )
    except ValueError as error:
        raise InvalidInput(f"optimizer: {error}") from error
    return AdamWOptions(
        learning_rate=rate,
        beta1=section.adam_beta1,
        beta2=section.adam_beta2,
        epsilon=section.adam_eps,
        weight_decay=section.weight_decay,
        clip_norm=section.clip_grad_norm,
    )
