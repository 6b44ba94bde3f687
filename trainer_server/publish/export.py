"""A Hugging Face folder from the parameters of all ranks that together hold one copy of the model.

Parameters are gathered one at a time: the first rank holds one parameter of every rank and one output file.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from relax_common.storage.checkpoint_folder import follow_umask
from relax_common.tensors import region
from trainer_server.megatron.parallel import CopyGroups
from trainer_server.model.hf_config import ModelError
from trainer_server.model.layouts import GroupRank, Place
from trainer_server.model.mapping import NameMap
from trainer_server.model.safetensors_folder import INDEX, SINGLE

FILE_BYTES = 4 << 30
_BESIDE_WEIGHTS = (
    "tokenizer*",
    "vocab*",
    "merges*",
    "special_tokens_map*",
    "added_tokens*",
    "chat_template*",
    "generation_config.json",
)


def full_tensors(
    names: NameMap, module: torch.nn.Module, place: Place, groups: CopyGroups
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, full tensor) on the first rank of the copy, nothing on the others; all must iterate."""
    for megatron_name, parameter in module.named_parameters():
        if names.is_of_expert(megatron_name):
            parts = _gathered(parameter, place.expert, groups.expert)
            places = [Place(place.tensor, GroupRank(rank, len(parts))) for rank in range(len(parts))]
        elif place.expert.rank == 0:
            parts = _gathered(parameter, place.tensor, groups.tensor)
            places = [Place(GroupRank(rank, len(parts)), place.expert) for rank in range(len(parts))]
        else:
            continue  # everything but experts is the same on all ranks of the expert-parallel group
        if parts:
            yield from _assembled(names, megatron_name, parts, places)


def _gathered(parameter: torch.Tensor, ours: GroupRank, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """All ranks' parameters on the group's first rank; an empty list on the others."""
    local = parameter.detach().contiguous()
    parts = [torch.empty_like(local) for _ in range(ours.size)] if ours.rank == 0 else []
    dist.gather(local, parts or None, dst=dist.get_global_rank(group, 0), group=group)
    return parts


def _assembled(
    names: NameMap, megatron_name: str, parts: list[torch.Tensor], places: list[Place]
) -> Iterator[tuple[str, torch.Tensor]]:
    full: dict[str, torch.Tensor] = {}
    for part, place in zip(parts, places, strict=True):
        for entry in names.slices_of(megatron_name, part, place):
            whole = full.setdefault(entry.hf_name, part.new_empty(entry.piece.full_shape))
            whole[region(entry.piece.start, entry.piece.extent)] = entry.tensor()
    yield from full.items()


def export_folder(
    names: NameMap,
    module: torch.nn.Module,
    place: Place,
    groups: CopyGroups,
    base: Path,
    out: Path,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write `out` from the current parameters, with configuration and tokenizer of `base`. The folder
    appears whole or not at all."""
    is_first = place.tensor.rank == place.expert.rank == 0
    _agree_that_free(out, is_first, groups)
    tensors = full_tensors(names, module, place, groups)
    if not is_first:
        for _ in tensors:
            raise AssertionError("only the first rank assembles tensors")
        return
    unfinished = out.with_name(out.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    dtype = _write_weights(tensors, unfinished, file_bytes)
    _write_config(base, unfinished, dtype, names)
    for pattern in _BESIDE_WEIGHTS:
        for path in base.glob(pattern):
            shutil.copy(path, unfinished / path.name)
    unfinished.rename(out)


def _agree_that_free(out: Path, is_first: bool, groups: CopyGroups) -> None:
    # One rank decides for all: if it alone raised, the others would wait for it in the first gather.
    taken = torch.tensor([int(is_first and out.exists())], device=torch.cuda.current_device())
    for group in (groups.tensor, groups.expert):
        dist.broadcast(taken, src=dist.get_global_rank(group, 0), group=group)
    if bool(taken.item()):
        raise ModelError(f"export folder {out} exists already; remove it or choose another")


def _write_weights(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, file_bytes: int) -> torch.dtype:
    """Files are numbered as they fill; their final names need the total and are given at the end."""
    files: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    total = 0

    def flush() -> None:
        save_file(pending, folder / f"part-{len(files)}", metadata={"format": "pt"})
        follow_umask(folder / f"part-{len(files)}")  # safetensors makes files for their owner alone
        files.append(list(pending))
        pending.clear()

    dtype = torch.float32
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if pending and sum(t.numel() * t.element_size() for t in pending.values()) + size > file_bytes:
            flush()
        pending[name] = tensor.cpu()
        total += size
        dtype = tensor.dtype
    flush()
    if len(files) == 1:
        (folder / "part-0").rename(folder / SINGLE)
        return dtype
    weight_map: dict[str, str] = {}
    for number, held in enumerate(files):
        final = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / final)
        weight_map |= dict.fromkeys(held, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")
    return dtype


def _write_config(base: Path, folder: Path, dtype: torch.dtype, names: NameMap) -> None:
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if names.value_head:
        config["architectures"] = [names.shape.architecture.replace("ForCausalLM", "ForTokenClassification")]
        config |= {"num_labels": 1, "id2label": {"0": "value"}, "label2id": {"value": 0}, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
