"""One rank of a role and the clients it uses: the single value from which the parts of the trainer are built."""

from dataclasses import dataclass
from pathlib import Path

from dcs.client import DcsClient, Head
from relax.dcs.v1 import dcs_pb2
from relax_common.recipe import Recipe
from relax_queue.client import QueueClient
from trainer_server.megatron.parallel import Parallel
from trainer_server.rank_group import RankGroup
from trainer_server.status import RoleStatus


@dataclass(frozen=True)
class Assignment:
    """What relaxd has assigned: the run, and where its controller and its folder are."""

    run: str
    term: int
    recipe: Recipe
    run_dir: Path
    controller: str
    instance: str


@dataclass(frozen=True)
class RankContext:
    """What a rank knows and whom it can ask."""

    assignment: Assignment
    parallel: Parallel
    group: RankGroup
    dcs: DcsClient
    queue: QueueClient
    status: RoleStatus

    def head(self) -> Head:
        """The head of dcs's log: one rank's view for all, because they must take the same branch."""
        answer = self.group.patiently(
            lambda: self.group.share(lambda: self.dcs.head_message().SerializeToString()), "the head"
        )
        return Head.from_message(dcs_pb2.GetHeadResponse.FromString(answer))

    @property
    def recipe(self) -> Recipe:
        return self.assignment.recipe
