"""Reads what a Hugging Face folder says about its weights, from the headers of its files; all daemons use it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from relax_common.errors import InvalidInput
from relax_common.json_types import JsonObject, JsonValue

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor. Transformer Engine's `_extra_state` entries are not weights and are left out.

    Raises InvalidInput in one line: no weights, a missing or damaged shard, two sets of weights in one folder.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _weight_files(folder):
        shapes |= {
            name: tuple(entry["shape"])
            for name, entry in _header(path).items()
            if name != "__metadata__" and "_extra_state" not in name
        }
    return shapes


def check_vocabulary(folder: Path, shapes: Mapping[str, tuple[int, ...]], vocab_size: int) -> None:
    """Refuse rows that pad the vocabulary: they do not belong in a folder."""
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in shapes and shapes[name][0] != vocab_size:
            raise InvalidInput(
                f"{folder}: tensor {name} has shape {shapes[name]}, but config.json says vocab_size = {vocab_size}"
            )


_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_BYTES = 1 << 20


def check_tied(folder: Path) -> None:
    """If config.json says that output layer and embedding are one tensor, a stored output layer must have the same
    bytes.

    A loader uses the embedding for both; with different bytes that would silently be another model."""
    found: dict[str, tuple[Path, int, dict[str, JsonValue]]] = {}
    for path in _weight_files(folder):
        header = _header(path)
        for name in (_EMBEDDING, _OUTPUT):
            if name in header:
                found[name] = path, _data_start(path), header[name]
    if len(found) < 2:
        return
    (one, start, first), (other, other_start, second) = found[_EMBEDDING], found[_OUTPUT]
    same = (first["dtype"], first["shape"]) == (second["dtype"], second["shape"])
    if not same or not _same_bytes(one, start, first["data_offsets"], other, other_start, second["data_offsets"]):
        raise InvalidInput(
            f"{folder}: config.json says tie_word_embeddings = true, but the stored {_OUTPUT} differs from "
            f"{_EMBEDDING}: set it to false to train both, or remove {_OUTPUT} from the weights"
        )


def _data_start(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _same_bytes(
    one: Path, start: int, offsets: Sequence[int], other: Path, other_start: int, other_offsets: Sequence[int]
) -> bool:
    with one.open("rb") as left, other.open("rb") as right:
        left.seek(start + offsets[0])
        right.seek(other_start + other_offsets[0])
        remaining = offsets[1] - offsets[0]
        while remaining > 0:
            size = min(_COMPARED_BYTES, remaining)
            if left.read(size) != right.read(size):
                return False
            remaining -= size
    return True


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / SINGLE, folder / INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise InvalidInput(f"{folder}: no .safetensors file")
        return files
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(f"{index}: not a safetensors index: {error}") from error
    missing = next((name for name in names if not (folder / name).is_file()), None)
    if missing is not None:
        raise InvalidInput(f"{index}: it names shard {missing}, which is missing from {folder}")
    if single.is_file() and SINGLE not in names:
        raise InvalidInput(
            f"{folder}: it holds both {SINGLE} and {INDEX}, which does not mention it: remove the one that is not the "
            "checkpoint"
        )
    return [folder / name for name in names]


def _header(path: Path) -> JsonObject:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= path.stat().st_size:
                raise InvalidInput(f"{path}: cut off, or not a safetensors file")
            header = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: not a readable safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise InvalidInput(f"{path}: not a readable safetensors file")
    return header
