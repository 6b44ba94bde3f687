"""The files that data.path names: files, folders of files, and datasets that Hugging Face datasets saved to disk."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from relax_common.errors import InvalidInput
from relax_common.json_types import JsonObject
from relaxd.data.arrow import read_arrow, read_parquet
from relaxd.data.jsonl import Raw, read_jsonl

_SPLITS = "dataset_dict.json"
_STATE = "state.json"
_READERS = {".parquet": read_parquet, ".arrow": read_arrow}
_SUFFIXES = (".jsonl", ".ndjson", *_READERS)
_SHARD_OF_SPLIT = re.compile(r"(?P<split>.+?)-\d+-of-\d+")


def read_files(paths: Sequence[Path], split: str, *, keep_latex: bool = False) -> Iterator[Raw]:
    """Rows of all files in order; a file alone may have any name and is then JSONL."""
    for path in paths:
        for file in _files(path, split):
            reader = _READERS.get(file.suffix)
            yield from reader(file) if reader else read_jsonl(file, keep_latex=keep_latex)


def _files(path: Path, split: str) -> list[Path]:
    if not path.is_dir():
        if path.exists() and not path.is_file():
            raise InvalidInput(f"data {path}: it is neither a file nor a folder")
        return [path]
    if (path / _SPLITS).is_file():
        splits = _json(path / _SPLITS).get("splits", [])
        return _saved(path / _chosen(path, splits, split))
    if (path / _STATE).is_file():
        return _saved(path)
    try:
        found_files = [file for file in path.rglob("*") if file.suffix in _SUFFIXES]
    except OSError as error:
        raise InvalidInput(f"data {path}: {error.filename}: {error.strerror}") from error
    files = sorted(
        file for file in found_files if not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise InvalidInput(f"data {path}: the folder has no {', '.join(_SUFFIXES)} file and is no saved dataset")
    by_split = {file: found["split"] for file in files if (found := _SHARD_OF_SPLIT.fullmatch(file.stem))}
    if len(by_split) < len(files):  # not a folder of a published dataset: there, every file names its split
        return files
    chosen = _chosen(path, sorted(set(by_split.values())), split)
    return [file for file in files if by_split[file] == chosen]


def _chosen(path: Path, splits: Sequence[str], split: str) -> str:
    """Splits are never mixed silently: test rows must not be trained on."""
    if split in splits:
        return split
    if not split and len(splits) == 1:
        return splits[0]
    missing = f"has no split {split!r}" if split else f"has {len(splits)} splits"
    raise InvalidInput(f"data {path}: it {missing}; set data.split to one of {', '.join(splits) or '(none)'}")


def _saved(folder: Path) -> list[Path]:
    state = _json(folder / _STATE)
    files = [folder / str(entry.get("filename")) for entry in state.get("_data_files") or []]
    if not files:
        raise InvalidInput(f"data {folder}: {_STATE} names no data files")
    if state.get("_indices_data_files"):
        raise InvalidInput(f"data {folder}: it was saved with an index of rows; save it again after flatten_indices()")
    return files


def _json(path: Path) -> JsonObject:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"data {path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInput(f"data {path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidInput(f"data {path}: expected an object, found {type(value).__name__}")
    return value
