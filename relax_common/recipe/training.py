"""How the policy is trained: optimizer, actor, and the roles that only compute."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from relax_common.recipe.base import Count, Real, Section


class Optimizer(Section):
    """Used by the actor, and by the critic with its own rate."""

    lr: Annotated[Real, Field(gt=0)] = 1e-6
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_updates: Annotated[int, Field(ge=0)] = 30
    """Updates until the full rate; without a warm-up, fresh Adam state wrecks a trained policy."""
    decay_updates: Annotated[int, Field(ge=0)] = 0
    """Updates until the cosine reaches lr_min; 0: those of the whole run."""
    lr_min: Annotated[Real, Field(ge=0)] = 0.0
    weight_decay: Annotated[Real, Field(ge=0)] = 0.0
    adam_beta1: Annotated[Real, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[Real, Field(ge=0, lt=1)] = 0.999
    adam_eps: Annotated[Real, Field(gt=0)] = 1e-8
    clip_grad_norm: Annotated[Real, Field(gt=0)] = 1.0
    bad_updates_max: Count = 3
    """Updates in a row that may be skipped for a non-finite loss or gradient; then the run stops."""

    @model_validator(mode="after")
    def _falls(self) -> Optimizer:
        if self.lr_min > self.lr:
            raise ValueError(f"lr_min = {self.lr_min:g} lies above lr = {self.lr:g}: the cosine would rise")
        return self


class Actor(Section):
    tensor_parallel_size: Count = 1
    data_parallel_size: Count = 1
    expert_parallel_size: Count = 1
    """Data-parallel ranks that share out the experts of a model with experts; each rank holds everything else."""
    recompute: Literal["none", "full"] = "none"
    """What the backward pass computes again instead of keeping: nothing, or each layer from its input."""
    tokens_per_microbatch: Count = 16384
    groups_per_chunk: Annotated[int, Field(ge=0)] = 0
    """Groups whose rows are trained while the rest is still generated; 0: the whole step at once."""
    packer: Literal["token_budget", "length_balanced", "sequential", "whole_groups"] = "token_budget"
    """How samples become micro-batches by rank: filled up to tokens_per_microbatch, longest first; spread so that sums
    of tokens are nearly equal; in order of arrival; one micro-batch per group."""
    threads_per_rank: Count = 1
    """OMP threads of each rank."""
    collective_timeout_seconds: Annotated[Real, Field(gt=0)] = 120.0
    """A rank (of a forward-only role too) that keeps the others waiting for this long counts as lost, and all ranks
    restart. It must cover the time dcs needs to take the state of a slower rank."""
    probe_rows: Count = 4
    """Rows of the probe that an engine must reproduce before it serves a version."""


class Reference(Section):
    """The role whose log-probs the policy is kept close to; it runs if algorithm.kl_loss_coef or
    algorithm.kl_reward_coef is above 0."""

    path: str = ""
    """Hugging Face folder of its weights, of any supported family with the same vocabulary; empty: model.path."""
    tensor_parallel_size: Count = 1


class ActorFwd(Section):
    """The role that computes log-probs with the weights a step starts from; it runs if algorithm.old_policy needs
    it."""

    tensor_parallel_size: Count = 1


class Critic(Section):
    """The role that estimates values; it runs if the algorithm needs it."""

    path: str = ""
    """Hugging Face folder it starts from, of any supported family with the same vocabulary: of a language model, whose
    output layer is then replaced by a value head of zeros, or an exported critic; empty: model.path."""
    lr: Annotated[Real, Field(gt=0)] = 1e-5
    tensor_parallel_size: Count = 1


class Teacher(Section):
    """The role that a policy is distilled from; it runs if the algorithm needs it."""

    path: str = ""
    """Hugging Face folder of its weights, of any supported family with the same vocabulary."""
    tensor_parallel_size: Count = 1
