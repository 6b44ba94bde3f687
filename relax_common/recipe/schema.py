"""All keys of a recipe. Every size carries its unit in its name; every default is in its section and only there."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from relax_common.recipe.algorithms import Algorithm, GrpoConfig
from relax_common.recipe.base import Count, Section
from relax_common.recipe.data import Data, Model
from relax_common.recipe.generation import Reward, Rollout, Sampling
from relax_common.recipe.services import Checkpoint, Dcs, Placement, Queue
from relax_common.recipe.training import Actor, ActorFwd, Critic, Optimizer, Reference, Teacher


class Recipe(Section):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
    seed: Annotated[int, Field(ge=0)] = 0
    """Fixes the order of the rows and, in the embedded engine, each sample: it is drawn from seed, group and sample.
    With max_staleness = 0, queue.deterministic and one embedded engine, the same seed gives the same rows and weights
    bit by bit. Otherwise timing decides which rows are computed together and which version samples them."""
    total_steps: Count
    prompts_per_step: Count
    samples_per_prompt: Count
    max_staleness: Annotated[int, Field(ge=0, le=1024)] = 1
    stale_policy: Literal["wait", "mask", "regenerate", "drop"] = "wait"
    """What happens to a group that would exceed max_staleness: the step waits for it, its old tokens leave the loss
    mask, it is generated again, or it is dropped."""
    snapshot_every: Count = 1
    """Steps between recovery snapshots of the actor."""
    min_valid_samples: Count = 2
    """A group with fewer samples whose reward is valid is dropped."""
    max_refills_per_step: Annotated[int, Field(ge=0)] = 0
    """Groups admitted in place of dropped ones per step; 0: as many as prompts_per_step."""
    dropped_steps_max: Count = 64
    """The run ends once this many steps' worth of groups (prompts_per_step each) were dropped in a row and none was
    trained, for example because all samples of every group got the same reward."""
    prompt_window_steps: Count = 4
    """Steps whose prompts wait in the queue ahead of generation."""
    model: Model
    data: Data
    sampling: Sampling = Sampling()
    reward: Reward = Reward()
    algorithm: Algorithm = GrpoConfig()
    optimizer: Optimizer = Optimizer()
    actor: Actor = Actor()
    reference: Reference = Reference()
    actor_fwd: ActorFwd = ActorFwd()
    critic: Critic = Critic()
    teacher: Teacher = Teacher()
    rollout: Rollout = Rollout()
    queue: Queue = Queue()
    dcs: Dcs = Dcs()
    placement: Placement = Placement()
    checkpoint: Checkpoint = Checkpoint()

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        if self.samples_per_prompt < self.algorithm.samples_min:
            raise ValueError(
                f"samples_per_prompt = {self.samples_per_prompt}: {self.algorithm.name} compares the samples of "
                "a group, so one sample always gets advantage 0; use at least 2"
            )
        if "reward_parts" in self.algorithm.optional_fields and len(self.reward.parts) < 2:
            raise ValueError(f"algorithm.name = {self.algorithm.name!r} normalises reward.parts; name at least two")
        if "teacher" in self.algorithm.roles and not self.teacher.path:
            raise ValueError(f"algorithm.name = {self.algorithm.name!r} needs teacher.path, the folder of its weights")
        if self.reward.overlong_tokens > self.sampling.max_new_tokens:
            raise ValueError(
                f"reward.overlong_tokens = {self.reward.overlong_tokens} exceeds sampling.max_new_tokens = "
                f"{self.sampling.max_new_tokens}"
            )
        if self.min_valid_samples > self.samples_per_prompt:
            raise ValueError(
                f"min_valid_samples = {self.min_valid_samples} exceeds samples_per_prompt = {self.samples_per_prompt}"
            )
        samples = self.prompts_per_step * self.samples_per_prompt
        if samples < self.actor.data_parallel_size:
            raise ValueError(
                f"{samples} samples per step cannot feed actor.data_parallel_size = {self.actor.data_parallel_size}"
            )
        row = self.data.prompt_tokens_max + self.sampling.max_new_tokens
        if self.actor.packer == "whole_groups" and row * self.samples_per_prompt > self.actor.tokens_per_microbatch:
            raise ValueError(
                f"a group of up to {row * self.samples_per_prompt} tokens does not fit actor.tokens_per_microbatch = "
                f"{self.actor.tokens_per_microbatch}; raise it or use packer = 'token_budget'"
            )
        if row > self.actor.tokens_per_microbatch:
            raise ValueError(
                f"a row of up to {row} tokens (data.prompt_tokens_max + sampling.max_new_tokens) does not fit "
                f"actor.tokens_per_microbatch = {self.actor.tokens_per_microbatch}"
            )
        if self.queue.closing_min_prompts > self.prompts_per_step:
            raise ValueError(
                f"queue.closing_min_prompts = {self.queue.closing_min_prompts} exceeds prompts_per_step = "
                f"{self.prompts_per_step}"
            )
        if self.actor.groups_per_chunk > self.prompts_per_step:
            raise ValueError(
                f"actor.groups_per_chunk = {self.actor.groups_per_chunk} exceeds prompts_per_step = "
                f"{self.prompts_per_step}"
            )
        return self
