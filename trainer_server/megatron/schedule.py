"""The learning rate as a function of how many optimizer updates were made."""

import math
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class LearningRate:
    """`peak` is reached after `warmup_updates`; "cosine" then falls to `floor` at `total_updates`."""

    peak: float
    warmup_updates: int = 0
    shape: Literal["constant", "cosine"] = "constant"
    total_updates: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.peak <= 0 or self.warmup_updates < 0 or self.floor < 0:
            raise ValueError(f"learning rate must be positive and warm-up not negative, found {self}")
        if self.shape == "cosine" and self.total_updates <= self.warmup_updates:
            raise ValueError(
                f"cosine needs total_updates ({self.total_updates}) > warmup_updates ({self.warmup_updates})"
            )

    def at(self, update: int) -> float:
        """The learning rate of the update with this index, counted from 0. In a warm-up the first one is already above
        0."""
        if update < self.warmup_updates:
            return self.peak * (update + 1) / self.warmup_updates
        if self.shape == "constant":
            return self.peak
        done = (update - self.warmup_updates) / (self.total_updates - self.warmup_updates)
        return self.floor + (self.peak - self.floor) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def apply_to(param_groups: list[dict[str, Any]], learning_rate: float, weight_decay: float) -> None:
    """Megatron marks norms and biases with `wd_mult` 0 and leaves it to its own scheduler to apply that;
    without it they would be decayed like matrices."""
    for group in param_groups:
        group["lr"] = learning_rate
        group["weight_decay"] = weight_decay * group["wd_mult"]
