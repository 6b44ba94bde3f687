"""Metrics of a rollout server."""

from prometheus_client import Counter, Gauge, Histogram, Summary

from relax_common.rows import RewardStatus

TOKENS = Counter("relax_rollout_tokens", "Tokens sampled in finished samples")
GROUPS = Counter("relax_rollout_groups", "Groups by how their lease ended", ["outcome"])
REWARDS = Counter("relax_rollout_rewards", "Rewards by status", ["status"])
# Labels are looked up once: every group counts its rewards.
REWARDS_BY_STATUS: dict[int, Counter] = {status: REWARDS.labels(status.name.lower()) for status in RewardStatus}
REWARD_PARTS = Summary("relax_rollout_reward_part", "Values of the parts of rewards", ["part"])
GENERATION_SECONDS = Histogram(
    "relax_rollout_generation_seconds",
    "Time from the request to the last token of a group",
    buckets=(0.01, 0.1, 1, 10, 60, 600),
)
STAGE_SECONDS = Histogram(
    "relax_rollout_stage_seconds",
    "Time to pull and assemble a version next to the live one",
    buckets=(0.01, 0.1, 1, 10, 60),
)
SWAP_PAUSE_SECONDS = Histogram(
    "relax_rollout_swap_pause_seconds",
    "How long generation was paused for a swap",
    buckets=(0.001, 0.01, 0.05, 0.1, 1, 10),
)
SWAP_FAILURES = Counter(
    "relax_rollout_swap_failures", "Versions that could not be staged, loaded or verified", ["phase"]
)
PROBE_DIFFERENCE = Gauge("relax_rollout_probe_max_difference", "Largest log-prob difference on the last probe")
VERSIONS_BEHIND = Gauge("relax_rollout_versions_behind", "Committed versions newer than the one served")
SAMPLES_IN_FLIGHT = Gauge("relax_rollout_samples_in_flight", "Samples leased and not yet put")
ENGINE_RESTARTS = Counter("relax_rollout_engine_restarts", "Times the engine was lost and started or found again")
