"""Sections and keys of a recipe. Every size carries its unit in its name; every default stands here and only here."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _real_number(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError(f"expected a number, got the text {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {value}")
    return value


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, str | Path) else value


Real = Annotated[float, BeforeValidator(_real_number)]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[Real, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


ENGINE_OPTIONS_TAKEN = frozenset({"model_path", "tokenizer_path", "dtype", "random_seed", "skip_tokenizer_init"})


class Model(Section):
    path: Path
    """Hugging Face folder of the base checkpoint; relative to the recipe file."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of parameters in the actor and in engines, and of the weights that are published and exported. The
    optimizer's own weights and moments are float32 in either case."""


class Data(Section):
    path: Annotated[tuple[Path, ...], BeforeValidator(_several)] = ()
    """JSONL, Parquet or Arrow file, folder of such files or of a dataset saved to disk, or a list of these; relative to
    the recipe file."""
    split: str = ""
    """Of a dataset with several splits."""
    generator: str = ""
    """Instead of path: "reasoning_gym:NAME", or package.module:function(size, seed, **options) that yields rows."""
    generator_rows: Count = 1000
    generator_seed: Annotated[int, Field(ge=0)] = 0
    generator_options: dict[str, bool | int | float | str] = {}
    """Arguments of the generator, for example min_digits."""
    prompt_field: str = "prompt"
    """A text, or a list of chat messages; if the last one is the assistant's, the response continues it."""
    label_field: str = "label"
    """Empty: the data has no label. In each key that names fields, "a.b" is field b of the object in field a."""
    unreadable_label: Literal["error", "drop"] = "error"
    """A label that the reward cannot read is an error, with its line, or its row is left out and counted."""
    template_fields: tuple[str, ...] = ("tools", "chat_template_kwargs", "enable_thinking")
    """Fields that the chat template gets, where a row has them: `tools`, an object of options, and single options by
    their names. A prompt that is a text cannot have one."""
    metadata_fields: tuple[str, ...] = ("*",)
    """Fields that travel to the reward; "*": all that are left."""
    media_fields: tuple[str, ...] = ()
    """Fields that name media by path, URL, data URI or bytes; they travel too."""
    as_chat: bool = False
    """A prompt that is a text becomes the user's message of a chat, which the model's template writes."""
    escape_control_tokens: bool = False
    """Break up control tokens of the model that messages spell out ("<|im_end|>"), by an invisible character; else they
    are the real tokens, as in every chat template."""
    latex_escapes: Literal["error", "keep"] = "error"
    """A JSON escape that was surely meant as LaTeX (one backslash in "\\frac") is an error, with its line, or stays the
    control character that it stands for."""
    system_prompt: str = ""
    """First message of every chat that has none of its own."""
    shuffle: bool = True
    """Each pass visits the rows in an order of its own, a function of seed and pass."""
    passes: Annotated[int, Field(ge=0)] = 0
    """Passes over the data; 0: as many as total_steps needs."""
    prompt_tokens_max: Count = 1024
    over_length: Literal["error", "drop"] = "error"
    """A longer prompt is an error, with its line, or left out and counted."""

    @model_validator(mode="after")
    def _one_source(self) -> Data:
        if bool(self.path) == bool(self.generator):
            raise ValueError("set either data.path or data.generator")
        if self.generator and ":" not in self.generator:
            raise ValueError(f"generator = {self.generator!r}: expected reasoning_gym:NAME or package.module:function")
        for key in ("generator_rows", "generator_seed", "generator_options"):
            if self.path and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is for data.generator, but data.path is set")
        if self.generator and self.split:
            raise ValueError("split is for data.path, but data.generator is set")
        return self


class Sampling(Section):
    temperature: Real = 1.0
    max_new_tokens: Count = 256

    @model_validator(mode="after")
    def _trains(self) -> Sampling:
        if self.temperature < 1e-3:
            raise ValueError(
                f"temperature = {self.temperature}: training rollouts need at least 0.001 "
                "(equal samples teach nothing, and logits are divided by it)"
            )
        return self


class Reward(Section):
    name: str = "exact"
    """Registered name, or an import path package.module:function."""
    parts: dict[str, Real] = {}
    """Instead of name: several rewards and their weights, summed; one that returns None is left out."""
    timeout_seconds: Annotated[Real, Field(gt=0)] = 10.0
    processes: Count = 1
    """Killable worker processes per rollout server."""

    @model_validator(mode="after")
    def _one_or_several(self) -> Reward:
        if self.parts and self.name != "exact":
            raise ValueError(f"name = {self.name!r} and parts exclude each other; give the reward a weight in parts")
        if zero := next((name for name, weight in self.parts.items() if not weight), None):
            raise ValueError(f"parts.{zero} = 0 changes nothing; leave it out")
        return self


class Algorithm(Section):
    name: Literal["grpo"] = "grpo"
    normalizer: Literal["group_mean_std", "group_mean", "leave_one_out"] = "group_mean_std"
    aggregation: Literal[
        "token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean", "token_sum"
    ] = "token_mean"
    aggregation_constant: Annotated[Real, Field(gt=0)] = 1.0
    """C of seq_mean_token_sum_norm."""
    eps_low: Annotated[Real, Field(gt=0, lt=1)] = 0.2
    eps_high: Annotated[Real, Field(gt=0)] = 0.28
    dual_clip: Annotated[Real, Field(ge=0)] = 0.0
    """Lower bound on the loss of negative advantages; 0: off, else > 1."""
    old_policy: Literal["behaviour", "actor_fwd"] = "behaviour"
    """Whose log-probs anchor the ratio: the engine's, or those that the role actor_fwd computes with the weights that
    the step starts from."""
    correction: Literal["none", "tis", "icepop"] = "none"
    """Weight of a token by old / behaviour: cut at correction_high (tis), or 0 outside the bounds (icepop)."""
    correction_low: Annotated[Real, Field(ge=0)] = 0.5
    correction_high: Annotated[Real, Field(gt=0)] = 2.0
    kl_coef: Annotated[Real, Field(ge=0)] = 0.0
    """Weight of the KL to the reference in the loss; 0: no reference role is started."""
    kl: Literal["k1", "abs", "k2", "k3", "k3+"] = "k3"

    @model_validator(mode="after")
    def _bounds(self) -> Algorithm:
        if self.dual_clip and self.dual_clip <= 1:
            raise ValueError(f"dual_clip = {self.dual_clip}: must be above 1, or 0 for off")
        if self.correction != "none" and self.old_policy == "behaviour":
            raise ValueError(
                f"correction = {self.correction!r} compares old with behaviour log-probs, which are the same under "
                "old_policy = 'behaviour'; set old_policy = 'actor_fwd' or correction = 'none'"
            )
        if self.correction_low >= self.correction_high:
            raise ValueError(
                f"correction_low = {self.correction_low} must lie below correction_high = {self.correction_high}"
            )
        return self


class Optimizer(Section):
    lr: Annotated[Real, Field(gt=0)] = 1e-6
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_updates: Annotated[int, Field(ge=0)] = 30
    """Updates until the full rate; fresh Adam state on a trained policy wrecks it without."""
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


class Actor(Section):
    tensor_parallel_size: Count = 1
    data_parallel_size: Count = 1
    expert_parallel_size: Count = 1
    """Data-parallel ranks that share out the experts of a model that has them; each holds all else."""
    recompute: Literal["none", "full"] = "none"
    """What the backward pass computes again instead of keeping: nothing, or each layer from its input."""
    tokens_per_microbatch: Count = 16384
    groups_per_chunk: Annotated[int, Field(ge=0)] = 0
    """Groups whose rows are trained while the rest is still generated; 0: the whole step at once."""
    shaper: Literal["token_budget", "length_balanced", "sequential", "whole_groups"] = "token_budget"
    """How samples become micro-batches by rank: filled up to tokens_per_microbatch, longest first; spread so that sums
    of tokens are nearly equal; in order of arrival; a micro-batch a group."""
    threads_per_rank: Count = 1
    """OMP threads of each rank."""
    collective_timeout_seconds: Annotated[Real, Field(gt=0)] = 120.0
    """A rank (of a forward-only role too) that keeps the others waiting for so long is lost, and all start again. It
    must cover what dcs takes for the state of a slower rank."""
    probe_rows: Count = 4
    """Rows of the probe that an engine must reproduce before it serves a version."""


class Reference(Section):
    """The role whose log-probs the policy is kept near; it runs where algorithm.kl_coef is above 0."""

    path: str = ""
    """Hugging Face folder of its weights, of any supported family with the same vocabulary; empty: model.path."""
    tensor_parallel_size: Count = 1


class ActorFwd(Section):
    """The role that computes log-probs with the weights a step starts from; it runs where algorithm.old_policy asks."""

    tensor_parallel_size: Count = 1


class Rollout(Section):
    servers: Count = 1
    engine: Literal["torch", "sglang"] = "torch"
    """torch runs inside the rollout server; sglang in a process of its own, or behind engine_urls."""
    engine_python: str = ""
    """Interpreter of the engine's process, relative to the recipe file; empty: that of the daemons."""
    engine_options: dict[str, bool | int | float | str] = {}
    """Arguments of sglang.Engine beyond those that follow from the recipe, for example tp_size."""
    engine_urls: tuple[str, ...] = ()
    """One running sglang.launch_server for each rollout server, http://host:port; empty: each starts an engine."""
    engine_silence_seconds: Annotated[Real, Field(gt=0)] = 60.0
    """An engine's process that does not answer for so long is killed and started again."""
    samples_in_flight_max: Annotated[int, Field(ge=0)] = 0
    """Samples one server generates at a time; 0: those of one step."""
    swap_mode: Literal["in_place", "retract", "abort"] = "in_place"
    """What running samples do at a weight swap: keep their key-value cache, be prefilled again inside the engine, or
    leave it and come back as prompts."""
    threads: Count = 1
    swap_timeout_seconds: Annotated[Real, Field(gt=0)] = 120.0
    """From handing a version to the engine until it has verified it; three that take longer end the server."""
    generate_timeout_seconds: Annotated[Real, Field(gt=0)] = 600.0
    """A server whose engine does not answer a group for so long ends and is started again."""

    @property
    def devices_per_server(self) -> int:
        """GPUs that an engine started by a rollout server computes on; the embedded engine computes on the CPU."""
        starts = self.engine == "sglang" and not self.engine_urls
        return int(self.engine_options.get("tp_size", 1)) if starts else 0

    @model_validator(mode="after")
    def _engine_keys(self) -> Rollout:
        tp_size = self.engine_options.get("tp_size", 1)
        if not isinstance(tp_size, int) or tp_size < 1:
            raise ValueError(f"engine_options.tp_size = {tp_size!r}: expected a number of GPUs")
        for key in ("engine_python", "engine_options", "engine_urls"):
            if getattr(self, key) and self.engine != "sglang":
                raise ValueError(f"{key} is for engine = 'sglang', the engine is {self.engine!r}")
            if getattr(self, key) and self.engine_urls and key != "engine_urls":
                raise ValueError(f"{key} is for engines that rollout servers start, but engine_urls names running ones")
        if self.engine_urls and len(self.engine_urls) != self.servers:
            raise ValueError(
                f"engine_urls names {len(self.engine_urls)} engines for servers = {self.servers}: one each is needed"
            )
        for url in self.engine_urls:
            if not re.fullmatch(r"https?://[^/\s:]+:\d+/?", url):
                raise ValueError(f"engine_urls: {url!r} is not http://host:port")
        if taken := sorted(ENGINE_OPTIONS_TAKEN & self.engine_options.keys()):
            raise ValueError(f"engine_options.{taken[0]} follows from the recipe and cannot be set")
        return self


class Queue(Section):
    memory_budget_bytes: Count = 1 << 30
    lease_ttl_seconds: Annotated[Real, Field(gt=0)] = 60.0
    lease_attempts_max: Annotated[int, Field(ge=0)] = 8
    """A group whose lease was lost so many times is dropped as quarantined; 0: never."""
    durability: Literal["metadata", "full"] = "metadata"
    """What survives a restart of the queue: groups, leases and plans, or the payload too."""
    closing: Literal["all", "min_n"] = "all"
    """A step closes with prompts_per_step groups, or with closing_min_prompts once its deadline has passed."""
    closing_min_prompts: Annotated[int, Field(ge=0)] = 0
    """Groups a step needs at least with closing = "min_n"."""
    closing_deadline_seconds: Annotated[Real, Field(ge=0)] = 0.0
    """From the commit that opened a step for planning, with closing = "min_n"."""
    deterministic: bool = False
    """Cut the chunks of a step only when it closes, as a function of seed, step, row keys and lengths alone. The
    embedded engine then computes one group at a time, so that its last bits do not depend on what else is there."""

    @model_validator(mode="after")
    def _closes(self) -> Queue:
        if self.closing == "min_n" and not (self.closing_min_prompts and self.closing_deadline_seconds):
            raise ValueError('closing = "min_n" needs closing_min_prompts and closing_deadline_seconds above 0')
        if self.closing == "all" and (self.closing_min_prompts or self.closing_deadline_seconds):
            raise ValueError('closing_min_prompts and closing_deadline_seconds need closing = "min_n"')
        return self


class Dcs(Section):
    memory_budget_bytes: Count = 4 << 30
    recovery_on_disk: bool = True
    """Keep the newest complete recovery state on the disk of dcs too, written beside training: when dcs and the actor
    end together (a reboot), at most snapshot_every steps are trained again. Without it the run goes back to its newest
    checkpoint, or to its start."""


class Placement(Section):
    """Which GPUs the run's processes are given, and what must fit them."""

    hosts: Count = 1
    gpus_per_host: Annotated[int, Field(ge=0)] = 0
    """Given to the actor's ranks, to those of forward-only roles, then to the engines of rollout servers, host by host;
    0: processes are limited to no device, and nothing is said about device memory."""
    gpu_memory_bytes: Count = 80_000_000_000
    """Of one GPU. A plan that needs more is refused."""


class Checkpoint(Section):
    every_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints on disk, written beside training; 0: none, and a stopped run cannot be resumed."""
    keep: Count = 3
    """Newest ones that stay; pinned ones stay besides."""
    failures_max: Count = 3
    """Saves in a row that may fail (a full disk); then the run stops. Each recovery snapshot tries again."""


class Recipe(Section):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
    seed: Annotated[int, Field(ge=0)] = 0
    """Fixes the order of the rows and, in the embedded engine, each sample: it is drawn from seed, group and sample.
    With max_staleness = 0, queue.deterministic and one embedded engine, the same seed gives the same rows and weights
    bit by bit. Otherwise it depends on time which rows are computed together and which version samples them."""
    total_steps: Count
    prompts_per_step: Count
    samples_per_prompt: Count
    max_staleness: Annotated[int, Field(ge=0, le=1024)] = 1
    stale_policy: Literal["wait", "mask", "regenerate", "drop"] = "wait"
    """What becomes of a group that would exceed max_staleness: the step waits for it, its old tokens leave the loss
    mask, it is generated again, or it is dropped."""
    snapshot_every: Count = 1
    """Steps between recovery snapshots of the actor."""
    min_valid_samples: Count = 2
    """A group with fewer samples whose reward is valid is dropped."""
    max_refills_per_step: Annotated[int, Field(ge=0)] = 0
    """Groups admitted in place of dropped ones per step; 0: as many as prompts_per_step."""
    dropped_steps_max: Count = 64
    """The run ends once so many steps' worth of groups (prompts_per_step each) were dropped in a row and none was
    trained, for example because all samples of every group got the same reward."""
    prompt_window_steps: Count = 4
    """Steps whose prompts wait in the queue ahead of generation."""
    model: Model
    data: Data
    sampling: Sampling = Sampling()
    reward: Reward = Reward()
    algorithm: Algorithm = Algorithm()
    optimizer: Optimizer = Optimizer()
    actor: Actor = Actor()
    reference: Reference = Reference()
    actor_fwd: ActorFwd = ActorFwd()
    rollout: Rollout = Rollout()
    queue: Queue = Queue()
    dcs: Dcs = Dcs()
    placement: Placement = Placement()
    checkpoint: Checkpoint = Checkpoint()

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        if self.samples_per_prompt < 2:
            raise ValueError(
                f"samples_per_prompt = {self.samples_per_prompt}: {self.algorithm.normalizer} compares the samples of "
                "a group, so one sample always gets advantage 0; use at least 2"
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
        if self.actor.shaper == "whole_groups" and row * self.samples_per_prompt > self.actor.tokens_per_microbatch:
            raise ValueError(
                f"a group of up to {row * self.samples_per_prompt} tokens does not fit actor.tokens_per_microbatch = "
                f"{self.actor.tokens_per_microbatch}; raise it or use shaper = 'token_budget'"
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
