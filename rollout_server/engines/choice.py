"""The engine that a recipe names."""

import torch

from relax_common.recipe import Recipe, derive
from rollout_server.config import RolloutConfig
from rollout_server.engines.contract import Engine
from rollout_server.engines.sglang.engine import SglangEngine, read_config
from rollout_server.engines.sglang.external import ExternalBackend, ExternalSettings
from rollout_server.engines.sglang.managed import ManagedBackend, ManagedSettings
from rollout_server.engines.torch.engine import TorchEngine

CPU_KV_TOKENS_SPARE = 4096


def make_engine(recipe: Recipe, config: RolloutConfig, seed: int) -> Engine:
    """Start the engine; `ready` tells when weights can be loaded. Raises EngineError, OSError, ValueError for a bad
    folder."""
    if recipe.rollout.engine == "torch":
        dtype = getattr(torch, recipe.model.dtype)
        return TorchEngine(recipe.model.path, seed, dtype, one_request_at_a_time=recipe.queue.deterministic)
    return _sglang(recipe, config, seed)


def _sglang(recipe: Recipe, config: RolloutConfig, seed: int) -> Engine:
    model_dir, rollout, derived = recipe.model.path, recipe.rollout, derive(recipe)
    architecture = read_config(model_dir)["architectures"][0]
    exact_versions = rollout.swap_mode == "in_place"
    if config.engine_url:
        external = ExternalSettings(
            url=config.engine_url,
            architecture=architecture,
            weights_dir=config.state_dir / "engine-weights",
            exact_versions=exact_versions,
            generate_seconds=rollout.generate_timeout_seconds,
            silence_seconds=rollout.engine_silence_seconds,
        )
        return SglangEngine(model_dir, ExternalBackend(external))
    managed = ManagedSettings(
        model_dir=model_dir,
        architecture=architecture,
        dtype=recipe.model.dtype,
        seed=seed,
        python=rollout.engine_python,
        log_path=config.state_dir / "engine.log",
        samples_in_flight_max=derived.samples_in_flight_max,
        # Room for each running sample at its longest, and for prompts that are prefilled for later samples.
        kv_tokens=derived.samples_in_flight_max * derived.tokens_per_row_max + CPU_KV_TOKENS_SPARE,
        exact_versions=exact_versions,
        silence_seconds=rollout.engine_silence_seconds,
        options=rollout.engine_options,
    )
    return SglangEngine(model_dir, ManagedBackend(managed))
