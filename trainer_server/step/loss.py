"""The loss of a policy over one step, with the statistics that are collected at the same time."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from trainer_server.algorithms import AnyAlgorithm, Tokens
from trainer_server.maths.aggregation import StepCounts, masked_sum
from trainer_server.packing.pack import Pack
from trainer_server.packing.rows import TrainRow, staleness_by_sample
from trainer_server.step.statistics import StepStatistics


class PolicyLoss:
    """Implements trainer_server.megatron.trainer.Loss."""

    def __init__(self, algorithm: AnyAlgorithm) -> None:
        self.algorithm = algorithm
        self.begin_step()

    def begin_step(self) -> None:
        self._statistics = StepStatistics()

    def begin_chunk(self, rows: Sequence[TrainRow], version: int) -> None:
        self._statistics.add_staleness(staleness_by_sample(rows, version))

    def of_pack(self, pack: Pack, outputs: Tensor, entropy: Tensor, version: int) -> Tensor:
        tokens = Tokens(
            policy=outputs,
            rollout=pack.rollout,
            advantages=pack.advantages,
            mask=pack.mask,
            sequences=pack.sequences,
            old=pack.old,
            reference=pack.reference,
            teacher=pack.teacher,
            selected=pack.selected,
            entropy=entropy,
        )
        result = self.algorithm.objective(tokens)
        total = masked_sum(result.tokens.loss, pack.weights, pack.mask)
        self._statistics.add(pack, outputs, entropy, result, total, version)
        return total

    def divisor(self, counts: StepCounts) -> float:
        return self.algorithm.divisor(counts)

    def end_step(self, group: dist.ProcessGroup) -> StepStatistics:
        return self._statistics.reduced(group)
