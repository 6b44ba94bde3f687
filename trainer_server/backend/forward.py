"""Log-probs of whole rows under fixed weights: what a forward-only role computes, and the actor's probe."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from trainer_server.backend.gpt_model import build_model
from trainer_server.backend.log_probs import VocabularyShard, token_log_probs
from trainer_server.backend.packing import dummy_pack, pack_rows
from trainer_server.backend.parallel import Parallel
from trainer_server.backend.rows import TrainRow
from trainer_server.model.hf_config import ModelShape
from trainer_server.model.layouts import padded_vocab_size
from trainer_server.model.load import load_weights
from trainer_server.model.mapping import NameMap, ParameterSlice


def vocabulary_shard(shape: ModelShape, parallel: Parallel, group: dist.ProcessGroup) -> VocabularyShard:
    """This rank's rows of the output layer."""
    rows = padded_vocab_size(shape.vocab_size, parallel.tensor_parallel) // parallel.tensor_parallel
    return VocabularyShard(group=group, start=parallel.place.tensor.rank * rows, true_size=shape.vocab_size)


@torch.no_grad()
def row_log_probs(
    model: Any, rows: Sequence[TrainRow], device: torch.device, shard: VocabularyShard
) -> list[np.ndarray]:
    """Of each row's tokens, [tokens]; the first token's is 0. Ranks that share a model must call it together; where
    others need its experts, one without rows computes for nothing."""
    pack = pack_rows(rows, device) if rows else dummy_pack(device)
    logits = model(pack.tokens, pack.positions, None, packed_seq_params=pack.packed)
    values, _ = token_log_probs(logits[0], pack.targets, pack.temperatures, shard)
    lengths = [len(row.tokens) for row in rows]
    parts = np.split(values.cpu().numpy(), np.cumsum(lengths)[:-1])
    return [np.concatenate([np.zeros(1, np.float32), part[:-1]]) for part in parts[: len(rows)]]


class ForwardModel:
    """A model without optimizer or gradients. Its weights come from a folder, or slice by slice from a version."""

    def __init__(self, parallel: Parallel, names: NameMap, dtype: torch.dtype = torch.float32) -> None:
        self.names = names
        self._place = parallel.place
        self._device = torch.device(torch.cuda.current_device())
        self._shard = vocabulary_shard(names.shape, parallel, parallel_state.get_tensor_model_parallel_group())
        _, self._module = build_model(names.shape, names.family, parallel, dtype)
        self._module.eval()

    def load(self, folder: Path) -> None:
        load_weights(folder, self.names, self._module, self._place)

    def slices(self) -> list[ParameterSlice]:
        """What this rank holds, to be filled."""
        return list(self.names.slices(self._module, self._place))

    def log_probs(self, rows: Sequence[TrainRow]) -> list[np.ndarray]:
        return row_log_probs(self._module, rows, self._device, self._shard)
