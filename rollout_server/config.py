"""Flags of the rollout daemon. Imports without torch."""

from typing import Self

from pydantic import model_validator

from relax_common.process.config import DaemonConfig


class RolloutConfig(DaemonConfig):
    """Generates, scores and puts the groups of one run."""

    engine_url: str = ""
    """A running sglang.launch_server, http://host:port, for recipes that name such engines."""

    @model_validator(mode="after")
    def _has_controller(self) -> Self:
        if not self.controller:
            raise ValueError("controller is not set: a rollout server gets its run from relaxd, name its host:port")
        return self
