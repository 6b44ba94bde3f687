"""A rank's whole state as bytes: fp32 parameters, Adam moments and steps, counters, random generators.

The format is safetensors with JSON metadata, no pickle. A state belongs to one layout and one rank of it. After a
restore, the same rows give bitwise the same next update.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors.torch import load

from relax_common.storage.sealed_memory import Buffer
from relax_common.torch_tensors import safetensors_name
from trainer_server.megatron.optimizer import MainShard, main_shards, publish_main_to_model
from trainer_server.megatron.trainer import Counters, Trainer

FORMAT = 1
_ADAM = ("step", "exp_avg", "exp_avg_sq")


class StateError(ValueError):
    """Bytes that are not the state of this rank in this layout."""


def state_parts(trainer: Trainer, labels: Mapping[str, int]) -> list[Buffer]:
    """The state in parts, which must be read before the next update: on the CPU they are the live tensors' own memory.
    `labels` (such as the policy version) come back from `state_from_bytes`."""
    tensors = {f"rng.tracker.{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    tensors["rng.default"] = torch.get_rng_state()
    for name, shard in _named_shards(trainer):
        tensors[f"main.{name}"] = shard.main.detach()
        for key in _ADAM:
            tensors[f"{key}.{name}"] = shard.adam[key]
    header = {
        "format": FORMAT,
        "layout": _layout(trainer),
        "updates": trainer.counters.updates,
        "skipped_in_a_row": trainer.counters.skipped_in_a_row,
        "labels": dict(labels),
    }
    return _safetensors({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, json.dumps(header))


def _safetensors(tensors: Mapping[str, torch.Tensor], metadata: str) -> list[Buffer]:
    """The safetensors format, in parts. The library's own writers make one more copy of all weights and moments, or
    write a file."""
    entries: dict[str, Any] = {"__metadata__": {"state": metadata}}
    parts: list[Buffer] = []
    end = 0
    # Large elements first: then every tensor begins at a multiple of its element's size.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        data = memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
        offsets = [end, end + data.nbytes]
        entries[name] = {"dtype": safetensors_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": offsets}
        parts.append(data)
        end += data.nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return [len(header).to_bytes(8, "little") + header, *parts]


def state_from_bytes(trainer: Trainer, data: bytes) -> dict[str, int]:
    """Restore in place; all ranks must call it together. Nothing is changed if the bytes do not fit."""
    header = _header(data)
    if header.get("format") != FORMAT or header.get("layout") != _layout(trainer):
        raise StateError(
            f"state of layout {header.get('layout')} (format {header.get('format')}) does not fit {_layout(trainer)}"
        )
    tensors = load(data)
    shards = _named_shards(trainer)
    for name, shard in shards:
        for key, target in (("main", shard.main), *((key, shard.adam[key]) for key in _ADAM)):
            found = tensors.get(f"{key}.{name}")
            if found is None or found.shape != target.shape:
                raise StateError(f"state lacks {key}.{name} of shape {tuple(target.shape)}")
    with torch.no_grad():
        for name, shard in shards:
            shard.main.copy_(tensors[f"main.{name}"])
            for key in _ADAM:
                shard.adam[key].copy_(tensors[f"{key}.{name}"])
    publish_main_to_model(trainer.optimizer, trainer.model)
    torch.set_rng_state(tensors["rng.default"])
    prefix = "rng.tracker."
    get_cuda_rng_tracker().set_states({n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)})
    trainer.counters = Counters(header["updates"], header["skipped_in_a_row"])
    trainer.begin_step()
    return {str(name): int(value) for name, value in header["labels"].items()}


def _named_shards(trainer: Trainer) -> list[tuple[str, MainShard]]:
    names = {parameter: name for name, parameter in trainer.module.named_parameters()}
    return [(names[shard.parameter], shard) for shard in main_shards(trainer.optimizer)]


def _layout(trainer: Trainer) -> list[int]:
    p = trainer.parallel
    return [p.rank, p.world_size, p.tensor_parallel, p.expert_parallel]


def _header(data: bytes) -> dict[str, Any]:
    """safetensors: 8 bytes of length, then a JSON header whose `__metadata__` holds our strings."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 + length:
        raise StateError(f"state is cut short: {len(data)} bytes, its header alone has {8 + length}")
    try:
        header: dict[str, Any] = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["state"])
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError) as error:
        raise StateError(f"not a rank state: {error}") from error
    return header
