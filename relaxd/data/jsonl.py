"""Rows of a JSONL file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax_common.errors import InvalidInput

Raw = tuple[str, dict[str, Any]]
"""Where a row stands, for people, and its fields."""


def read_jsonl(path: Path) -> Iterator[Raw]:
    """A byte-order mark, CRLF, blank lines and a missing final newline are fine; anything else is refused."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InvalidInput(f"data {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"data {path}: not UTF-8 at byte {error.start}") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip(" \t\r\n"):
            where = f"data {path}, line {number}"
            yield where, _row(line, where)


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line, object_pairs_hook=lambda pairs: _object(pairs, where), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidInput(f"{where}: expected an object, found {type(value).__name__}")
    return value


def _object(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise InvalidInput(f"{where}: key {key!r} stands twice")
        result[key] = value
    return result


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")
