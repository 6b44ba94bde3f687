"""From a recipe to the parts of a role."""

from pathlib import Path

from dcs.client import DcsClient
from relax_common.errors import InvalidInput
from relax_common.recipe import ForwardRole, Recipe, derive
from relax_common.rpc.registration import Granted
from relax_queue.client import QueueClient
from trainer_server.config import TrainerConfig
from trainer_server.controller import HeadReporter
from trainer_server.from_recipe import algorithm_of, dtype_of, optimizer_of
from trainer_server.megatron.forward import ForwardModel
from trainer_server.megatron.parallel import Parallel
from trainer_server.megatron.trainer import Trainer
from trainer_server.model.load import read_name_map
from trainer_server.publish.publisher import ROLE, Publisher
from trainer_server.rank_group import RankGroup
from trainer_server.roles.actor import Actor
from trainer_server.roles.scorer import Forward
from trainer_server.status import RoleStatus
from trainer_server.step.training import StepTraining


def parallel_of(config: TrainerConfig, recipe: Recipe) -> Parallel:
    """This process's place in its role."""
    if config.role == ROLE:
        actor = recipe.actor
        return Parallel(config.rank, config.world_size, actor.tensor_parallel_size, actor.expert_parallel_size)
    return Parallel(config.rank, config.world_size, _forward_role(config, recipe).tensor_parallel_size)


def _forward_role(config: TrainerConfig, recipe: Recipe) -> ForwardRole:
    for role in derive(recipe).forward_roles:
        if role.name == config.role:
            return role
    raise InvalidInput(f"--role {config.role}: the recipe's algorithm does not ask for it")


def make_actor(
    config: TrainerConfig,
    granted: Granted,
    recipe: Recipe,
    parallel: Parallel,
    group: RankGroup,
    dcs: DcsClient,
    queue: QueueClient,
    status: RoleStatus,
) -> Actor:
    trainer = Trainer(
        parallel,
        read_name_map(recipe.model.path),
        algorithm_of(recipe),
        optimizer_of(recipe, derive(recipe)),
        recipe.optimizer.bad_updates_max,
        recipe.seed,
        dtype_of(recipe),
        recompute=recipe.actor.recompute == "full",
    )
    training = StepTraining(queue, group, trainer, status, recipe.actor.probe_rows)
    publisher = Publisher(dcs, group, trainer, status, recipe.snapshot_every)
    reporter = HeadReporter(config.controller, granted.run, config.instance or ROLE, granted.term)
    return Actor(recipe, dcs, group, trainer, training, publisher, reporter, status)


def make_forward(
    config: TrainerConfig,
    recipe: Recipe,
    parallel: Parallel,
    group: RankGroup,
    dcs: DcsClient,
    queue: QueueClient,
    status: RoleStatus,
) -> Forward:
    role = _forward_role(config, recipe)
    names = read_name_map(Path(role.model_path) if role.model_path else recipe.model.path)
    wanted = read_name_map(recipe.model.path).shape.vocab_size
    if names.shape.vocab_size != wanted:
        raise InvalidInput(
            f"reference.path = {role.model_path}: its vocabulary has {names.shape.vocab_size} ids, that of the policy "
            f"has {wanted}"
        )
    return Forward(role, dcs, queue, group, ForwardModel(parallel, names, dtype_of(recipe)), status)
