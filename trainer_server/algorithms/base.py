"""What an algorithm is to the trainer: advantages from rewards, and the loss per token (minimised).

An algorithm is a file here: a class over its section of the recipe, made of functions of `trainer_server.maths`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from relax_common.recipe.algorithm import AlgorithmConfig
from trainer_server.maths.aggregation import StepCounts, denominator, token_weight
from trainer_server.maths.correction import correction_weights
from trainer_server.maths.kl import kl_per_token
from trainer_server.maths.policy_loss import TokenLoss

Config = TypeVar("Config", bound=AlgorithmConfig)


@dataclass(frozen=True)
class LogProbs:
    """Log-probs of the tokens, each [tokens]: under the policy being trained, under the engine that sampled them, at
    the start of the step and under the reference (the last two only if the algorithm asks for them)."""

    policy: Tensor
    rollout: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """`kl` and `correction` [tokens] are None where the algorithm has neither."""

    tokens: TokenLoss
    kl: Tensor | None = None
    correction: Tensor | None = None


class Algorithm(ABC, Generic[Config]):
    """A subclass defines how advantages and token losses are computed; anchor, correction, KL penalty and aggregation
    follow from its section."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def advantages(self, rewards: Tensor, group_ids: Sequence[str], valid: Tensor) -> Tensor:
        """rewards [samples] fp32, valid [samples] bool -> advantages [samples] fp32."""

    @abstractmethod
    def token_loss(self, log_probs: Tensor, anchor: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
        """The policy loss [tokens] before correction and penalty. `anchor` are the log-probs the ratio is against."""

    def objective(self, log_probs: LogProbs, advantages: Tensor, mask: Tensor) -> Objective:
        """The whole loss: policy loss, times the correction, plus the penalty. Inputs [tokens], mask bool. Raises
        ValueError if log-probs that the algorithm needs are missing."""
        config = self.config
        anchor = log_probs.rollout if config.old_policy == "rollout" else self._needed(log_probs.old, "old")
        tokens = self.token_loss(log_probs.policy, anchor, advantages, mask)
        loss, kl, weights = tokens.loss, None, None
        if config.correction != "none":
            weights = correction_weights(
                config.correction, anchor, log_probs.rollout, mask, config.correction_low, config.correction_high
            )
            loss = loss * weights
        if config.kl_coef:
            zero = torch.zeros_like(log_probs.policy)
            reference = self._needed(log_probs.reference, "reference")
            # Masked before, not after: the gradient of where(mask, f(NaN), 0) would still be NaN.
            kl = kl_per_token(
                config.kl, torch.where(mask, log_probs.policy, zero), torch.where(mask, reference, zero)
            )  # fmt: skip
            loss = loss + config.kl_coef * kl
        return Objective(replace(tokens, loss=loss), kl, weights)

    def token_weight(self, tokens_in_sample: int) -> float:
        """The weight by which every token of a sample is multiplied before the sum over tokens."""
        return token_weight(self.config.aggregation, tokens_in_sample)

    def divisor(self, counts: StepCounts) -> float:
        """The number by which the sum over the whole step is divided, once."""
        return denominator(self.config.aggregation, self.config.aggregation_constant, counts)

    def _needed(self, values: Tensor | None, name: str) -> Tensor:
        if values is None:
            raise ValueError(f"{self.config.name}: the rows carry no {name} log-probs")
        return values


AnyAlgorithm = Algorithm[Any]
"""An algorithm over whichever section."""
