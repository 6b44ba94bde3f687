"""One rank's model and optimizer: accumulate chunks, then one update.

Gradients stay unnormalised sums in fp32 until the step has closed; Megatron's finalisation then sums them
over the ranks and divides them, once, by the denominator of the whole step.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func

from relax_common.rows import RowKey
from trainer_server.maths.aggregation import StepCounts
from trainer_server.megatron.forward import output_of, row_outputs, target_logits
from trainer_server.megatron.model import build_model
from trainer_server.megatron.optimizer import AdamWOptions, build_optimizer, main_shards
from trainer_server.megatron.parallel import CopyGroups, Parallel
from trainer_server.megatron.schedule import apply_to
from trainer_server.model.load import load_weights
from trainer_server.model.mapping import NameMap, ParameterSlice
from trainer_server.packing.pack import Pack, dummy_pack, pack_rows
from trainer_server.packing.rows import TrainRow


class NonFiniteUpdates(RuntimeError):
    """Too many updates in a row were skipped because loss or gradient was not finite."""


class Statistics(Protocol):
    """What a loss has counted over one step, over all ranks."""

    @property
    def trained_tokens(self) -> int: ...

    def as_metrics(self) -> dict[str, float]: ...


class Loss(Protocol):
    """What an update minimises: a sum over packs, chunks and ranks that is divided once."""

    def begin_step(self) -> None:
        """Reset the counts."""

    def begin_chunk(self, rows: Sequence[TrainRow], version: int) -> None:
        """`version` is the packed policy version being trained."""

    def of_pack(self, pack: Pack, outputs: torch.Tensor, entropy: torch.Tensor, version: int) -> torch.Tensor:
        """The sum over the pack's tokens, from the log-probs [P] of its targets, or from values."""

    def divisor(self, counts: StepCounts) -> float:
        """The number by which the sum over the whole update is divided."""

    def end_step(self, group: dist.ProcessGroup) -> Statistics:
        """The counts, summed over the ranks of the group."""


@dataclass(frozen=True)
class UpdateReport:
    """`loss` is the update's aggregated loss; `skipped_rows` is set if the update was skipped because of what is not
    finite. An update without a trained token is not made: `made` is False."""

    loss: float
    grad_norm: float
    learning_rate: float
    made: bool = True
    skipped_rows: tuple[RowKey, ...] = ()


@dataclass
class Counters:
    """Counters that are part of a rank's state: they determine the learning rate and when to stop."""

    updates: int = 0
    skipped_in_a_row: int = 0


class Trainer:
    def __init__(
        self,
        parallel: Parallel,
        names: NameMap,
        loss: Loss,
        options: AdamWOptions,
        max_skipped_updates: int = 3,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        recompute: bool = False,
    ) -> None:
        """Parameters have `dtype` and are uninitialised until `reset` or a restored state. The weights that the
        optimizer updates are fp32, with a shard on each data-parallel rank."""
        self.parallel = parallel
        self.names = names
        self.loss = loss
        self.options = options
        self.counters = Counters()
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.copy_groups = CopyGroups(self.tensor_group, parallel_state.get_expert_model_parallel_group())
        self.data_group = parallel_state.get_data_parallel_group()
        self.device = torch.device(torch.cuda.current_device())
        self._max_skipped_updates = max_skipped_updates
        self._seed = seed
        config, module = build_model(names, parallel, dtype, recompute)
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(config, ddp_config, module)
        self.optimizer = build_optimizer(options, self.model, dtype)
        # The schedule would finalise at the end of every call, but here a step consists of several calls.
        config.finalize_model_grads_func = None
        config.no_sync_func = self.model.no_sync
        self._output = output_of(names, parallel)
        self.begin_step()

    def reset(self, weights_folder: Path) -> None:
        """Start from a Hugging Face folder: its weights, fresh optimizer state, no update made yet."""
        load_weights(weights_folder, self.names, self.module, self.parallel.place)
        self.optimizer.reload_model_params()
        for shard in main_shards(self.optimizer):
            for state in shard.adam.values():
                state.zero_()
        tensor_parallel.model_parallel_cuda_manual_seed(self._seed)
        self.counters = Counters()
        self.begin_step()

    @property
    def module(self) -> Any:
        return self.model.module

    def slices(self) -> Iterator[ParameterSlice]:
        return self.names.slices(self.module, self.parallel.place)

    def begin_step(self) -> None:
        """Drop the accumulated gradients and counts."""
        self.loss.begin_step()
        self._begin_update()

    def _begin_update(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._rows: list[RowKey] = []
        self._suspects: list[RowKey] = []
        self._update_ended = False

    def accumulate(self, micro_batches: Sequence[Sequence[TrainRow]], version: int, micro_batch_count: int) -> None:
        """Forward and backward of this rank's part of one chunk. `version` is the packed policy version being
        trained; `micro_batch_count` the largest part among the data-parallel ranks."""
        if self._update_ended:
            self._begin_update()
        packs = [pack_rows(rows, self.device) for rows in micro_batches]
        packs += [dummy_pack(self.device)] * (max(micro_batch_count, 1) - len(packs))
        rows = [row for pack in packs for row in pack.rows]
        self._rows += [row.key for row in rows]
        self.loss.begin_chunk(rows, version)

        def forward_step(iterator: Iterator[Pack], model: Any) -> tuple[torch.Tensor, Any]:
            pack = next(iterator)

            def loss(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
                return self._loss(logits, pack, version)

            return target_logits(model, pack), loss

        self.model.train()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(packs),
            model=self.model,
            num_microbatches=len(packs),
            seq_length=packs[0].tokens.size(1),
            micro_batch_size=1,
            forward_only=False,
        )

    def finish_update(self, counts: StepCounts) -> UpdateReport:
        """Divide once, clip and update. Every rank gets the same report. `counts` are those of the whole update;
        without a trained token, weights, moments and schedule stay as they are."""
        learning_rate = self.options.learning_rate.at(self.counters.updates)
        self._update_ended = True
        if not counts.tokens:
            return UpdateReport(0.0, 0.0, learning_rate, made=False)
        divisor = self.loss.divisor(counts)
        # Megatron sums this over the data-parallel ranks before dividing by it.
        share = divisor if self.parallel.dp_rank == 0 else 0.0
        finalize_model_grads([self.model], torch.tensor(share, dtype=torch.float64, device=self.device))
        dist.all_reduce(self._loss_sum, group=self.data_group)
        loss = float(self._loss_sum) / divisor
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        skipped: tuple[RowKey, ...] = ()
        if math.isfinite(grad_norm) and math.isfinite(loss):
            apply_to(self.optimizer.param_groups, learning_rate, self.options.weight_decay)
            self.optimizer.step()
            self.counters = Counters(updates=self.counters.updates + 1)
        else:
            skipped = self._skip_update(grad_norm, loss)
        return UpdateReport(loss, grad_norm, learning_rate, not skipped, skipped)

    def statistics(self) -> Statistics:
        """The counts of the step so far, over the data-parallel ranks."""
        return self.loss.end_step(self.data_group)

    def _skip_update(self, grad_norm: float, loss: float) -> tuple[RowKey, ...]:
        rows = tuple(self._suspects or self._rows)
        self.counters = Counters(self.counters.updates, self.counters.skipped_in_a_row + 1)
        if self.counters.skipped_in_a_row >= self._max_skipped_updates:
            named = ", ".join(map(str, rows[:8]))
            raise NonFiniteUpdates(
                f"{self.counters.skipped_in_a_row} updates in a row skipped (loss {loss}, gradient norm {grad_norm}); "
                f"rows on rank {self.parallel.rank}: {named}"
            )
        return rows

    def outputs(self, rows: Sequence[TrainRow]) -> list[np.ndarray]:
        """Log-probs (a critic: values) of each row's tokens under the current weights, [tokens]; the first token's is
        0. See `row_outputs`."""
        return row_outputs(self.model, rows, self.device, self._output)

    def _loss(
        self, logits: torch.Tensor, pack: Pack, version: int
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        outputs, entropy = self._output(logits, pack)
        total = self.loss.of_pack(pack, outputs, entropy, version)
        self._loss_sum += total.detach()
        if not bool(torch.isfinite(total)):
            self._suspects += [row.key for row in pack.rows]
        return total, pack.mask.sum().to(torch.int), {"loss": total.detach()}
