"""The weights of a Hugging Face folder: one `model.safetensors`, or shards with an index."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from relax_common.tensors import region
from trainer_server.model.hf_config import ModelError
from trainer_server.model.layouts import Piece

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class WeightsFolder:
    """`files` maps each tensor to the file that holds it."""

    folder: Path
    files: Mapping[str, Path]

    def check(self, shapes: Mapping[str, tuple[int, ...]], ignored: frozenset[str] = frozenset()) -> None:
        """Exactly the expected tensors, each of its expected shape, before anything is loaded."""
        missing = sorted(set(shapes) - set(self.files))
        if missing:
            raise ModelError(f"{self.folder}: tensor {missing[0]} is missing ({len(missing)} missing in all)")
        unknown = sorted(name for name in set(self.files) - set(shapes) - ignored if "_extra_state" not in name)
        if unknown:
            raise ModelError(
                f"{self.folder}: tensor {unknown[0]} does not belong to the architecture in config.json "
                f"({len(unknown)} such tensors)"
            )
        for path in sorted(set(self.files.values())):
            with _open(path) as file:
                for name in (n for n in shapes if self.files[n] == path):
                    found = tuple(file.get_slice(name).get_shape())
                    if found != shapes[name]:
                        raise ModelError(f"{path}: tensor {name} has shape {found}, expected {shapes[name]}")

    def read(self, name: str, piece: Piece) -> torch.Tensor:
        with _open(self.files[name]) as file:
            tensor: torch.Tensor = file.get_slice(name)[region(piece.start, piece.extent)]
        return tensor


def open_folder(folder: Path) -> WeightsFolder:
    single, index = folder / SINGLE, folder / INDEX
    if not folder.is_dir():
        raise ModelError(f"checkpoint folder {folder} does not exist")
    if index.is_file():
        files = _files_of_index(folder, index)
        if single.is_file() and single not in files.values():
            raise ModelError(
                f"{folder} holds both {SINGLE} and {INDEX}, which does not mention it: remove the one that is "
                "not the checkpoint"
            )
        return WeightsFolder(folder, files)
    if not single.is_file():
        raise ModelError(f"{folder} has neither {SINGLE} nor {INDEX}")
    return WeightsFolder(folder, dict.fromkeys(_names_in(single), single))


def _files_of_index(folder: Path, index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): folder / str(file) for name, file in weight_map.items()}
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a safetensors index: {error}") from error
    for path in sorted(set(files.values())):
        if not path.is_file():
            raise ModelError(f"{index} names shard {path.name}, which is missing from {folder}")
        present = _names_in(path)
        absent = sorted(name for name, file in files.items() if file == path and name not in present)
        if absent:
            raise ModelError(f"{index} places tensor {absent[0]} in {path.name}, which does not hold it")
    return files


def _names_in(path: Path) -> frozenset[str]:
    with _open(path) as file:
        return frozenset(file.keys())


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from error
