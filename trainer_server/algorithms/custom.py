"""An estimator or a loss of the user's own, by import path."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from relax_common.errors import InvalidInput
from relax_common.recipe.algorithms import CustomConfig
from trainer_server.algorithms.base import Samples, Tokens
from trainer_server.algorithms.grpo import ClippedAlgorithm
from trainer_server.maths.policy_loss import TokenLoss, log_ratio, token_loss


class Custom(ClippedAlgorithm[CustomConfig]):
    def __init__(self, config: CustomConfig, part_weights: Sequence[float] = ()) -> None:
        super().__init__(config, part_weights)
        self._loss = _function("loss", config.loss)
        self._estimator = _function("estimator", config.estimator)

    def advantages(self, samples: Samples) -> Tensor:
        if self._estimator is None:
            return super().advantages(samples)
        values = self._estimator(samples, **self.config.parameters)
        return _checked("estimator", values, samples.rewards.shape, self.config.estimator).float()

    def token_loss(self, tokens: Tokens, anchor: Tensor) -> TokenLoss:
        if self._loss is None:
            return super().token_loss(tokens, anchor)
        loss = self._loss(tokens, anchor, **self.config.parameters)
        loss = _checked("loss", loss, tokens.policy.shape, self.config.loss)
        return token_loss(loss, log_ratio(tokens.policy, anchor, tokens.mask).exp(), tokens.mask)


def _function(key: str, path: str) -> Callable[..., Any] | None:
    if not path:
        return None
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidInput(f"algorithm.{key} = {path!r}: {error}") from error
    if not callable(found):
        raise InvalidInput(f"algorithm.{key} = {path!r} is not a function")
    function: Callable[..., Any] = found
    return function


def _checked(key: str, values: object, shape: tuple[int, ...], path: str) -> Tensor:
    if not isinstance(values, Tensor) or values.shape != shape:
        found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InvalidInput(f"algorithm.{key} = {path!r} returned {found}, expected a tensor of shape {tuple(shape)}")
    return values
