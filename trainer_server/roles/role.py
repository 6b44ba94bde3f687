"""What a role is: something that one group of ranks does for a run, until the run has no more steps.

A new role is one file with a class that implements `Role`, and its entry in `roles.ROLES`. Its columns are entries of
`relax_common.rows.FIELDS`.
"""

from typing import Literal, Protocol

from relax.common.v1 import common_pb2
from relax_common.recipe import Recipe
from trainer_server.context import RankContext
from trainer_server.megatron.parallel import Parallel


class Role(Protocol):
    """`reads` and `writes` are fields of rows. `needs_version` says whether a role that reads rows of step s must have
    version s first."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> common_pb2.Role:
        """The name under which relaxd registers it."""

    @property
    def trainable(self) -> bool:
        """Whether it changes weights, and therefore publishes versions and states at dcs."""

    @property
    def reads(self) -> tuple[str, ...]: ...

    @property
    def writes(self) -> tuple[str, ...]: ...

    @property
    def needs_version(self) -> Literal["step", "any"]: ...

    def parallel(self, recipe: Recipe, rank: int, world_size: int) -> Parallel:
        """A rank's place. Raises InvalidInput if the recipe does not use the role."""

    def run(self, context: RankContext) -> None:
        """Runs on every rank until the run has no more steps."""
