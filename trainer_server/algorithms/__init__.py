"""The algorithms, one file each, made of the functions in trainer_server.maths."""

from relax_common.recipe.algorithm import AlgorithmConfig, GrpoConfig
from trainer_server.algorithms.base import Algorithm, AnyAlgorithm, LogProbs, Objective
from trainer_server.algorithms.grpo import Grpo

ALGORITHMS: dict[type[AlgorithmConfig], type[AnyAlgorithm]] = {GrpoConfig: Grpo}
"""By their section of the recipe."""


def make_algorithm(config: AlgorithmConfig) -> AnyAlgorithm:
    return ALGORITHMS[type(config)](config)


__all__ = ["ALGORITHMS", "Algorithm", "AnyAlgorithm", "LogProbs", "Objective", "make_algorithm"]
