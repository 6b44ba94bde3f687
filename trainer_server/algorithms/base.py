"""What an algorithm is to the trainer: advantages from rewards, and the loss per token (minimised).

An algorithm is a file here: a class over its section of the recipe, made of functions of `trainer_server.maths`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from relax_common.recipe.algorithm import AlgorithmConfig
from relax_common.recipe.algorithms import GroupConfig
from trainer_server.maths.advantages import group_advantages
from trainer_server.maths.aggregation import StepCounts, denominator, token_weight
from trainer_server.maths.correction import accepted, correction_weights
from trainer_server.maths.kl import kl_per_token
from trainer_server.maths.policy_loss import TokenLoss, log_ratio, masked
from trainer_server.maths.sequences import Sequences

Config = TypeVar("Config", bound=AlgorithmConfig)


@dataclass(frozen=True)
class Samples:
    """The samples of whole groups whose advantages are computed together: those of a chunk, or of a step.

    `rewards` and `valid` are [samples]; `reward_parts` [samples, parts]; the others [samples, tokens], the rows of a
    sample one after another, `mask` saying which tokens are trained. They are there if the algorithm reads them.
    """

    groups: Sequence[str]
    rewards: Tensor
    valid: Tensor
    reward_parts: Tensor | None = None
    mask: Tensor | None = None
    anchor: Tensor | None = None
    reference: Tensor | None = None
    values: Tensor | None = None
    teacher: Tensor | None = None


@dataclass(frozen=True)
class Tokens:
    """The tokens of a pack, each tensor [tokens]: their log-probs under the policy being trained and under the engine
    that sampled them, at the start of the step, under the reference and a teacher (if the algorithm asks for them);
    which of them were selected (if it selects); the entropy of the policy at each; and the samples they belong to."""

    policy: Tensor
    rollout: Tensor
    advantages: Tensor
    mask: Tensor
    sequences: Sequences
    old: Tensor | None = None
    reference: Tensor | None = None
    selected: Tensor | None = None
    entropy: Tensor | None = None
    teacher: Tensor | None = None


@dataclass(frozen=True)
class Survey:
    """All trained tokens of an update in the order of their keys, before it: [tokens]. `seed` differs per update."""

    policy: NDArray[np.float32]
    anchor: NDArray[np.float32]
    advantages: NDArray[np.float32]
    seed: int


@dataclass(frozen=True)
class Objective:
    """`kl` and `correction` [tokens] are None where the algorithm has neither."""

    tokens: TokenLoss
    kl: Tensor | None = None
    correction: Tensor | None = None


class Algorithm(ABC, Generic[Config]):
    """A subclass defines how advantages and token losses are computed; anchor, correction, KL, entropy and aggregation
    follow from its section."""

    def __init__(self, config: Config, part_weights: Sequence[float] = ()) -> None:
        """`part_weights` are those of reward.parts, in the recipe's order."""
        self.config = config
        self.part_weights = tuple(part_weights)

    @abstractmethod
    def advantages(self, samples: Samples) -> Tensor:
        """[samples], or [samples, tokens] where they differ per token; fp32."""

    @abstractmethod
    def token_loss(self, tokens: Tokens, anchor: Tensor) -> TokenLoss:
        """The policy loss before correction and penalties. `anchor` [tokens] are the log-probs the ratio is against."""

    def select(self, survey: Survey) -> NDArray[np.bool_]:
        """Which tokens `Tokens.selected` marks; asked once per update if the section says that it surveys."""
        return np.ones(len(survey.policy), np.bool_)

    def objective(self, tokens: Tokens) -> Objective:
        """The whole loss: policy loss, times the correction, plus the penalties. Raises ValueError if log-probs that
        the algorithm needs are missing."""
        config = self.config
        anchor = tokens.rollout if config.old_policy == "rollout" else self._needed(tokens.old, "old log-probs")
        result = self.token_loss(tokens, anchor)
        weights = self._weights(tokens, anchor)
        loss, kl = result.loss if weights is None else result.loss * weights, None
        if config.kl_loss_coef:
            reference = self._needed(tokens.reference, "reference log-probs")
            kl = kl_per_token(config.kl, masked(tokens.policy, tokens.mask), masked(reference, tokens.mask))
            if config.kl_unbiased:
                kl = kl * log_ratio(tokens.policy, anchor, tokens.mask).exp()
            loss = loss + config.kl_loss_coef * kl
        if config.entropy_coef:
            loss = loss - config.entropy_coef * masked(self._needed(tokens.entropy, "entropy"), tokens.mask)
        return Objective(replace(result, loss=loss), kl, weights)

    def _weights(self, tokens: Tokens, anchor: Tensor) -> Tensor | None:
        c = self.config
        if c.correction == "none" and c.rejection == "none":
            return None
        pair = (anchor, tokens.rollout, tokens.mask, tokens.sequences)
        weights = correction_weights(c.correction, c.correction_level, *pair, c.correction_low, c.correction_high)
        kept = accepted(c.rejection, c.rejection_level, *pair, c.rejection_low, c.rejection_high)
        return weights * kept

    def penalised(self, samples: Samples) -> Tensor:
        """Rewards [samples], less the KL to the reference summed over a sample's tokens, if it counts in the reward."""
        penalty = self.reward_penalty(samples)
        return samples.rewards.float() if penalty is None else samples.rewards.float() - penalty.sum(1)

    def reward_penalty(self, samples: Samples) -> Tensor | None:
        """kl_reward_coef times the KL of each token, [samples, tokens]; None without a coefficient."""
        if not self.config.kl_reward_coef:
            return None
        mask = self._needed(samples.mask, "mask")
        anchor, reference = (
            self._needed(samples.anchor, "old log-probs"),
            self._needed(samples.reference, "reference log-probs"),
        )
        kl = kl_per_token(self.config.kl, masked(anchor, mask), masked(reference, mask))
        return self.config.kl_reward_coef * masked(kl, mask)

    def token_weight(self, tokens_in_sample: int) -> float:
        """The weight by which every token of a sample is multiplied before the sum over tokens."""
        return token_weight(self.config.aggregation, tokens_in_sample)

    def divisor(self, counts: StepCounts) -> float:
        """The number by which the sum over the whole update is divided, once."""
        return denominator(self.config.aggregation, self.config.aggregation_constant, counts)

    def _needed(self, values: Tensor | None, name: str) -> Tensor:
        if values is None:
            raise ValueError(f"{self.config.name}: the rows carry no {name}")
        return values


Group = TypeVar("Group", bound=GroupConfig)


class GroupAlgorithm(Algorithm[Group]):
    """Advantages relative to the group."""

    def advantages(self, samples: Samples) -> Tensor:
        return group_advantages(self.config.normalizer, self.penalised(samples), samples.groups, samples.valid)


AnyAlgorithm = Algorithm[Any]
"""An algorithm over whichever section."""
