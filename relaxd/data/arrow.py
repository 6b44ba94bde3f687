"""Rows of Parquet and Arrow files. pyarrow is imported when the first such file is read."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax_common.errors import InvalidInput
from relax_common.json_types import JsonValue
from relaxd.data.jsonl import Raw
from relaxd.data.messages import without_nulls

_BATCH_ROWS = 4096


def read_parquet(path: Path) -> Iterator[Raw]:
    """Reads every row group, empty ones included. Integers keep every digit: they never pass through a float."""
    pyarrow = _pyarrow(path)
    try:
        with importlib.import_module("pyarrow.parquet").ParquetFile(path) as file:
            yield from _rows(path, file.schema_arrow.names, file.iter_batches(batch_size=_BATCH_ROWS))
    except (OSError, pyarrow.ArrowException) as error:
        raise InvalidInput(f"data {path}: {_reason(error, 'Parquet')}") from error


def read_arrow(path: Path) -> Iterator[Raw]:
    """The stream format that saved datasets have, or the file format."""
    pyarrow = _pyarrow(path)
    try:
        with pyarrow.memory_map(str(path)) as source:
            try:
                reader = pyarrow.ipc.open_stream(source)
                batches: Any = reader
            except pyarrow.ArrowInvalid:
                reader = pyarrow.ipc.open_file(source)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            yield from _rows(path, reader.schema.names, batches)
    except (OSError, pyarrow.ArrowException) as error:
        raise InvalidInput(f"data {path}: {_reason(error, 'Arrow')}") from error


def _rows(path: Path, names: list[str], batches: Iterator[Any]) -> Iterator[Raw]:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidInput(f"data {path}: column {twice!r} occurs twice")
    number = 0
    for batch in batches:
        for values in batch.to_pylist():
            number += 1
            yield f"data {path}, row {number}", {name: without_nulls(value) for name, value in values.items()}


def _pyarrow(path: Path) -> JsonValue:
    if not path.is_file():
        raise InvalidInput(f"data {path}: No such file or directory")
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise InvalidInput(f"data {path}: reading it needs pyarrow: pip install 'relax-rl[data]'") from error


def _reason(error: Exception, kind: str) -> str:
    return f"not a readable {kind} file: {str(error).splitlines()[0]}"
