"""The algorithms, made of the functions in trainer_server.maths."""

from collections.abc import Sequence
from typing import Any

from relax_common.recipe import algorithms as recipe
from relax_common.recipe.algorithm import AlgorithmConfig
from trainer_server.algorithms.base import Algorithm, AnyAlgorithm, Objective, Samples, Survey, Tokens
from trainer_server.algorithms.cispo import Cispo
from trainer_server.algorithms.covariance import ClipCov, KlCov
from trainer_server.algorithms.custom import Custom
from trainer_server.algorithms.dppo_tv import DppoTv
from trainer_server.algorithms.gdpo import Gdpo
from trainer_server.algorithms.gmpo import Gmpo
from trainer_server.algorithms.grpo import Grpo
from trainer_server.algorithms.gspo import Gspo
from trainer_server.algorithms.m2po import M2po
from trainer_server.algorithms.opd import Opd
from trainer_server.algorithms.opsm import Opsm
from trainer_server.algorithms.ppo import Ppo
from trainer_server.algorithms.reinforce import ReinforcePp, ReinforcePpBaseline, Rloo
from trainer_server.algorithms.sapo import Sapo

ALGORITHMS: dict[type[AlgorithmConfig], type[Algorithm[Any]]] = {
    recipe.GrpoConfig: Grpo,
    recipe.DrGrpoConfig: Grpo,
    recipe.DapoConfig: Grpo,
    recipe.MaxRlConfig: Grpo,
    recipe.DecoupledPpoConfig: Grpo,
    recipe.GdpoConfig: Gdpo,
    recipe.OpsmConfig: Opsm,
    recipe.GspoConfig: Gspo,
    recipe.GmpoConfig: Gmpo,
    recipe.SapoConfig: Sapo,
    recipe.CispoConfig: Cispo,
    recipe.DppoTvConfig: DppoTv,
    recipe.M2poConfig: M2po,
    recipe.KlCovConfig: KlCov,
    recipe.ClipCovConfig: ClipCov,
    recipe.RlooConfig: Rloo,
    recipe.ReinforcePpConfig: ReinforcePp,
    recipe.ReinforcePpBaselineConfig: ReinforcePpBaseline,
    recipe.PpoConfig: Ppo,
    recipe.OpdConfig: Opd,
    recipe.CustomConfig: Custom,
}
"""By their section of the recipe."""


def make_algorithm(config: AlgorithmConfig, part_weights: Sequence[float] = ()) -> AnyAlgorithm:
    """`part_weights` are those of reward.parts, in the recipe's order."""
    return ALGORITHMS[type(config)](config, part_weights)


__all__ = ["ALGORITHMS", "Algorithm", "AnyAlgorithm", "Objective", "Samples", "Survey", "Tokens", "make_algorithm"]
