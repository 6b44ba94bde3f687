"""One rank of a role and the clients it uses: the single value from which the parts of the trainer are built."""

from dataclasses import dataclass
from pathlib import Path

from dcs.client import DcsClient
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

    @property
    def recipe(self) -> Recipe:
        return self.assignment.recipe
