"""What the recipe's sections mean to the trainer."""

import torch

from relax_common.recipe import Derived, Recipe
from trainer_server.megatron.optimizer import AdamWOptions
from trainer_server.megatron.schedule import LearningRate


def dtype_of(recipe: Recipe) -> torch.dtype:
    """Of parameters."""
    dtype: torch.dtype = getattr(torch, recipe.model.dtype)
    return dtype


def optimizer_of(recipe: Recipe, derived: Derived) -> AdamWOptions:
    section = recipe.optimizer
    return AdamWOptions(
        learning_rate=LearningRate(
            peak=section.lr,
            warmup_updates=section.warmup_updates,
            shape=section.schedule,
            total_updates=derived.decay_updates,
            floor=section.lr_min,
        ),
        beta1=section.adam_beta1,
        beta2=section.adam_beta2,
        epsilon=section.adam_eps,
        weight_decay=section.weight_decay,
        clip_norm=section.clip_grad_norm,
    )
