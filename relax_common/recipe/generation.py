"""How responses are generated and judged: sampling, rewards, rollout servers and their engines."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from relax_common.recipe.base import Count, Real, Section


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
    overlong_tokens: Annotated[int, Field(ge=0)] = 0
    """Within so many tokens of sampling.max_new_tokens an answer is penalised, in proportion; 0: never."""
    overlong_penalty: Annotated[Real, Field(gt=0)] = 1.0
    """What is subtracted from the reward of an answer that reaches sampling.max_new_tokens."""

    @model_validator(mode="after")
    def _one_orseveral(self) -> Reward:
        if self.parts and self.name != "exact":
            raise ValueError(f"name = {self.name!r} and parts exclude each other; give the reward a weight in parts")
        if zero := next((name for name, weight in self.parts.items() if not weight), None):
            raise ValueError(f"parts.{zero} = 0 changes nothing; leave it out")
        return self


ENGINE_OPTIONS_TAKEN = frozenset({"model_path", "tokenizer_path", "dtype", "random_seed", "skip_tokenizer_init"})


class Rollout(Section):
    servers: Count = 1
    engine: Literal["torch", "sglang"] = "torch"
    """torch runs inside the rollout server; sglang runs in a process of its own, or is reached by engine_urls."""
    engine_python: str = ""
    """Interpreter of the engine's process, relative to the recipe file; empty: that of the daemons."""
    engine_options: dict[str, bool | int | float | str] = {}
    """Arguments of sglang.Engine beyond those that follow from the recipe, for example tp_size."""
    engine_urls: tuple[str, ...] = ()
    """One running sglang.launch_server for each rollout server, http://host:port; empty: each starts an engine."""
    engine_silence_seconds: Annotated[Real, Field(gt=0)] = 60.0
    """An engine process that does not answer for this long is killed and started again."""
    samples_in_flight_max: Annotated[int, Field(ge=0)] = 0
    """Samples that one server generates at a time; 0: those of one step."""
    swap_mode: Literal["in_place", "retract", "abort"] = "in_place"
    """What running samples do at a weight swap: keep their key-value cache, be prefilled again inside the engine, or
    leave it and come back as prompts."""
    threads: Count = 1
    swap_timeout_seconds: Annotated[Real, Field(gt=0)] = 120.0
    """Time from handing a version to the engine until it is verified; after three swaps that take longer, the server
    ends."""
    generate_timeout_seconds: Annotated[Real, Field(gt=0)] = 600.0
    """If the engine does not answer a group for this long, the server ends and is started again."""

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
