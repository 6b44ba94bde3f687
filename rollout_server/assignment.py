"""Builds the parts of a working server from what relaxd granted."""

import math
from dataclasses import dataclass

import xxhash

from dcs.client import DcsClient
from relax_common.errors import InvalidInput
from relax_common.recipe import Recipe, derive
from relax_common.rpc.registration import Granted
from relax_queue.client import AioQueueClient
from rollout_server.config import RolloutConfig
from rollout_server.engines.choice import make_engine
from rollout_server.engines.contract import Engine, EngineError, PauseMode, SamplingParams, Tolerance
from rollout_server.groups.runner import GroupRunner, Sizes
from rollout_server.rewards.outcome import Overlong
from rollout_server.rewards.pool import RewardPool
from rollout_server.rewards.process import RewardWorkerError
from rollout_server.rewards.registry import reward_spec
from rollout_server.tokenizers import TextTokenizer
from rollout_server.version_follower import Holder, VersionFollower
from rollout_server.workflows.single_turn import SingleTurn

# Engine and publisher hold the same bits (their hashes are equal) but add up in a different order. In bfloat16 that
# changes a log-prob by hundredths, and a single one by any amount if a router chooses another expert. Tensors in wrong
# places change all log-probs by far more.
PROBE_TOLERANCE = {"float32": Tolerance(1e-4, 1e-4), "bfloat16": Tolerance(math.inf, 0.1)}


@dataclass(frozen=True)
class Work:
    """Everything that serves one run under one term."""

    run: str
    term: int
    queue: AioQueueClient
    dcs: DcsClient
    engine: Engine
    tokenizer: TextTokenizer
    rewards: RewardPool
    follower: VersionFollower
    groups: GroupRunner

    @property
    def waits_for(self) -> str:
        """What the server waits for, for heartbeat and status; empty while it generates."""
        return self.follower.waits_for or (self.groups.waits_for if not self.groups.groups_in_flight else "")

    def close(self) -> None:
        self.dcs.close()
        self.engine.close()
        self.rewards.close()


def start_work(granted: Granted, server: str, queue: AioQueueClient, config: RolloutConfig) -> Work:
    """Blocks while model and reward workers start. Raises InvalidInput if parts of the recipe cannot be loaded."""
    recipe = granted.require_recipe()
    holder = Holder(server, granted.term)
    try:
        tokenizer = TextTokenizer(recipe.model.path)
        engine = make_engine(recipe, config, _seed(recipe, holder))
    except (EngineError, OSError, ValueError) as error:  # transformers raises the latter two for folders it cannot use
        raise InvalidInput(f"model.path = {recipe.model.path}: {str(error).splitlines()[0]}") from error
    try:
        spec = reward_spec(recipe.reward.name, recipe.reward.parts)
        rewards = RewardPool(spec, recipe.reward.processes, recipe.reward.timeout_seconds)
    except RewardWorkerError as error:
        engine.close()
        raise InvalidInput(f"reward: {error}") from error
    dcs = DcsClient(granted.peers.dcs, granted.run)
    dcs.register_term(server, granted.term)
    follower = VersionFollower(
        dcs,
        engine,
        holder,
        PauseMode(recipe.rollout.swap_mode),
        recipe.rollout.swap_timeout_seconds,
        PROBE_TOLERANCE[recipe.model.dtype],
    )
    workflow = SingleTurn(
        engine,
        tokenizer,
        rewards,
        SamplingParams(recipe.sampling.temperature, recipe.sampling.max_new_tokens),
        recipe.data.prompt_tokens_max,
        recipe.rollout.generate_timeout_seconds,
        recipe.seed,
        _overlong(recipe),
        tuple(recipe.reward.parts) if "reward_parts" in recipe.algorithm.optional_fields else (),
    )
    groups = GroupRunner(queue, follower, engine, workflow, holder, _sizes(recipe))
    return Work(granted.run, granted.term, queue, dcs, engine, tokenizer, rewards, follower, groups)


def _sizes(recipe: Recipe) -> Sizes:
    return Sizes(
        groups_at_a_time=max(1, derive(recipe).samples_in_flight_max // recipe.samples_per_prompt),
        min_valid_samples=recipe.min_valid_samples,
        lease_ttl_seconds=recipe.queue.lease_ttl_seconds,
        drops_equal_rewards=recipe.algorithm.drops_equal_rewards,
    )


def _overlong(recipe: Recipe) -> Overlong | None:
    reward = recipe.reward
    if not reward.overlong_tokens:
        return None
    return Overlong(recipe.sampling.max_new_tokens, reward.overlong_tokens, reward.overlong_penalty)


def _seed(recipe: Recipe, holder: Holder) -> int:
    """Servers of one run, and incarnations of one server, must not draw the same samples."""
    digest = xxhash.xxh3_64_intdigest(f"{recipe.seed}/{holder.server}/{holder.term}".encode())
    return digest >> 1  # torch takes signed 64-bit seeds
