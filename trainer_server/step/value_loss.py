"""The loss of a critic over one step, with what is counted at the same time."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_server.maths.aggregation import StepCounts
from trainer_server.maths.policy_loss import masked
from trainer_server.packing.pack import Pack
from trainer_server.packing.rows import TrainRow


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """(0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), where the clip decides it), both [tokens]; 0
    where the mask is off. Inputs [tokens] (Schulman et al. 2017)."""
    if not values.shape == old_values.shape == returns.shape == mask.shape:
        raise ValueError(f"values {tuple(values.shape)} and returns {tuple(returns.shape)} differ in shape")
    values, old_values, returns = masked(values, mask), masked(old_values, mask), masked(returns, mask)
    bounded = old_values + (values - old_values).clamp(-clip, clip)
    plain, clipped = (values - returns).square(), (bounded - returns).square()
    return 0.5 * torch.maximum(plain, clipped), mask & (clipped > plain)


@dataclass(frozen=True)
class ValueStatistics:
    """Sums over the trained tokens."""

    tokens: float
    loss: float
    clipped: float

    @property
    def trained_tokens(self) -> int:
        return int(self.tokens)

    def as_metrics(self) -> dict[str, float]:
        """Means over the trained tokens."""
        n = max(self.tokens, 1.0)
        return {"value_loss": self.loss / n, "value_clip_fraction": self.clipped / n}


class ValueLoss:
    """Implements trainer_server.megatron.trainer.Loss: a mean over tokens, in any split."""

    def __init__(self, clip: float) -> None:
        self._clip = clip
        self.begin_step()

    def begin_step(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64)

    def begin_chunk(self, rows: Sequence[TrainRow], version: int) -> None:
        return None

    def of_pack(self, pack: Pack, outputs: Tensor, entropy: Tensor, version: int) -> Tensor:
        if pack.values is None or pack.returns is None:
            raise ValueError("the rows carry no values or no returns")
        loss, clipped = clipped_value_loss(outputs, pack.values, pack.returns, pack.mask, self._clip)
        total = loss.sum()
        self._sums += torch.stack([pack.mask.sum().double(), total.detach().double(), clipped.sum().double()]).cpu()
        return total

    def divisor(self, counts: StepCounts) -> float:
        return float(counts.tokens)

    def end_step(self, group: dist.ProcessGroup) -> ValueStatistics:
        sums = self._sums.to(torch.device(torch.cuda.current_device()))
        dist.all_reduce(sums, group=group)
        return ValueStatistics(*sums.tolist())
