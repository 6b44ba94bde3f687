"""Log-probs of whole rows under fixed weights: what a forward-only role computes, and the actor's probe."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from trainer_server.megatron.attention import packed_rows
from trainer_server.megatron.log_probs import VocabularyShard, token_log_probs
from trainer_server.megatron.model import build_model
from trainer_server.megatron.parallel import Parallel
from trainer_server.model.hf_config import ModelShape
from trainer_server.model.layouts import padded_vocab_size
from trainer_server.model.load import load_weights
from trainer_server.model.mapping import NameMap, ParameterSlice
from trainer_server.packing.pack import Pack, dummy_pack, pack_rows
from trainer_server.packing.rows import TrainRow


def vocabulary_shard(shape: ModelShape, parallel: Parallel, group: dist.ProcessGroup) -> VocabularyShard:
    """This rank's rows of the output layer."""
    rows = padded_vocab_size(shape.vocab_size, parallel.tensor_parallel) // parallel.tensor_parallel
    return VocabularyShard(group=group, start=parallel.place.tensor.rank * rows, true_size=shape.vocab_size)


class Output(Protocol):
    """What is made of a model's output at the places of a pack."""

    def __call__(self, logits: torch.Tensor, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [P, rows of this vocabulary shard] (or [P, 1] of a value head) -> (log-probs or values, entropy), both
        [P] fp32."""


@dataclass(frozen=True)
class LogProbOutput:
    """Log-probs of the targets."""

    shard: VocabularyShard

    def __call__(self, logits: torch.Tensor, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
        return token_log_probs(logits, pack.targets, pack.temperatures, self.shard)


@dataclass(frozen=True)
class ValueOutput:
    """Values of the states in which the targets were chosen."""

    def __call__(self, logits: torch.Tensor, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
        values = logits[:, 0].float()
        return values, torch.zeros_like(values)


def output_of(names: NameMap, parallel: Parallel) -> Output:
    if names.value_head:
        return ValueOutput()
    return LogProbOutput(vocabulary_shard(names.shape, parallel, parallel_state.get_tensor_model_parallel_group()))


@torch.no_grad()
def row_outputs(model: Any, rows: Sequence[TrainRow], device: torch.device, output: Output) -> list[np.ndarray]:
    """Log-probs (or values) of each row's tokens, [tokens]; the first token's is 0. Ranks that share a model must call
    it together; a rank without rows computes on dummy rows, because others may need its experts."""
    pack = pack_rows(rows, device, predict="all") if rows else dummy_pack(device)
    values, _ = output(target_logits(model, pack), pack)
    parts = np.split(values.cpu().numpy(), np.cumsum([len(row.tokens) - 1 for row in rows]))[: len(rows)]
    return [np.concatenate([np.zeros(1, np.float32), part]) for part in parts]


def target_logits(model: Any, pack: Pack) -> torch.Tensor:
    """[P, rows of this vocabulary shard]. The output layer runs only at places that predict a target: over a large
    vocabulary it costs more than many layers."""
    logits: torch.Tensor = model(
        pack.tokens,
        pack.positions,
        None,
        packed_seq_params=packed_rows(pack),
        output_processor=_at_places,
        output_processor_context=pack.places,
    )
    return logits


def _at_places(
    *, hidden_states: torch.Tensor, output_layer: Any, output_weight: Any, context: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Megatron calls it with the last layer's output [T, 1, hidden]."""
    logits: torch.Tensor = output_layer(hidden_states.index_select(0, context), weight=output_weight)[0]
    return logits[:, 0]


class ForwardModel:
    """A model without optimizer or gradients. Its weights come from a folder, or slice by slice from a version."""

    def __init__(self, parallel: Parallel, names: NameMap, dtype: torch.dtype = torch.float32) -> None:
        self.names = names
        self._place = parallel.place
        self._device = torch.device(torch.cuda.current_device())
        self._output = output_of(names, parallel)
        _, self._module = build_model(names, parallel, dtype)
        self._module.eval()

    def load(self, folder: Path) -> None:
        load_weights(folder, self.names, self._module, self._place)

    def slices(self) -> list[ParameterSlice]:
        """The slices that this rank holds, to be filled."""
        return list(self.names.slices(self._module, self._place))

    def log_probs(self, rows: Sequence[TrainRow]) -> list[np.ndarray]:
        return row_outputs(self._module, rows, self._device, self._output)
