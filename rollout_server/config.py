"""Flags of the rollout daemon."""

from relax_common.daemon_config import DaemonConfig


class RolloutConfig(DaemonConfig):
    """Generates, scores and puts the groups of one run."""
