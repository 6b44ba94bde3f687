"""A Hugging Face folder from the parameters of all tensor-parallel ranks.

Tensors pass one at a time: rank 0 of the tensor-parallel group holds one full tensor and one output file.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from trainer_server.model.errors import ModelError
from trainer_server.model.layouts import TensorRank
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
    names: NameMap, module: torch.nn.Module, tp: TensorRank, group: dist.ProcessGroup
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, full tensor) on tensor-parallel rank 0, nothing on the others; all must iterate."""
    first = dist.get_global_rank(group, 0)
    for megatron_name, parameter in module.named_parameters():
        local = parameter.detach().contiguous()
        parts = [torch.empty_like(local) for _ in range(tp.size)] if tp.rank == 0 else None
        dist.gather(local, parts, dst=first, group=group)
        if parts is not None:
            yield from _assembled(names, megatron_name, parts)


def _assembled(names: NameMap, megatron_name: str, parts: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    full: dict[str, torch.Tensor] = {}
    for rank, part in enumerate(parts):
        for entry in names.slices_of(megatron_name, part, TensorRank(rank, len(parts))):
            whole = full.setdefault(entry.hf_name, part.new_empty(entry.piece.full_shape))
            ranges = tuple(slice(s, s + e) for s, e in zip(entry.piece.start, entry.piece.extent, strict=True))
            whole[ranges] = entry.tensor()
    yield from full.items()


def export_folder(
    names: NameMap,
    module: torch.nn.Module,
    tp: TensorRank,
    group: dist.ProcessGroup,
    base: Path,
    out: Path,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write `out` from the current parameters, with configuration and tokenizer of `base`. The folder
    appears whole or not at all."""
    _agree_that_free(out, tp, group)
    tensors = full_tensors(names, module, tp, group)
    if tp.rank:
        for _ in tensors:
            raise AssertionError("only tensor-parallel rank 0 assembles tensors")
        return
    unfinished = out.with_name(out.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    dtype = _write_weights(tensors, unfinished, file_bytes)
    _write_config(base, unfinished, dtype)
    for pattern in _BESIDE_WEIGHTS:
        for path in base.glob(pattern):
            shutil.copy(path, unfinished / path.name)
    unfinished.rename(out)


def _agree_that_free(out: Path, tp: TensorRank, group: dist.ProcessGroup) -> None:
    # Rank 0 decides for all: had it alone refused, the others would wait for it in the first gather.
    taken = torch.tensor([int(tp.rank == 0 and out.exists())], device=torch.cuda.current_device())
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


def _write_config(base: Path, folder: Path, dtype: torch.dtype) -> None:
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
