"""Prompts from a JSONL file, with file and line in every complaint, and the order in which a run visits them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from relax_common.errors import InvalidInput
from relax_common.recipe.schema import Data


@dataclass(frozen=True)
class PromptRow:
    """One line of the data."""

    line: int
    prompt: str
    label: str | None
    metadata_json: str


def read_prompts(data: Data) -> list[PromptRow]:
    """All rows. A byte-order mark, CRLF, blank lines and a missing final newline are fine; anything else is refused."""
    try:
        text = data.path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InvalidInput(f"data {data.path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"data {data.path}: not UTF-8 at byte {error.start}") from error
    rows = [_row(data, number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip(" \t\r\n")]
    if not rows:
        raise InvalidInput(f"data {data.path}: no rows")
    return rows


def _row(data: Data, number: int, line: str) -> PromptRow:
    where = f"data {data.path}, line {number}"
    try:
        value = json.loads(line, object_pairs_hook=lambda pairs: _object(pairs, where), parse_constant=_refuse_constant)
    except ValueError as error:
        raise InvalidInput(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidInput(f"{where}: expected an object, found {type(value).__name__}")
    if data.prompt_field not in value:
        raise InvalidInput(f"{where}: no field {data.prompt_field!r}; it has {', '.join(sorted(value)) or 'none'}")
    prompt = value.pop(data.prompt_field)
    if not isinstance(prompt, str) or not prompt:
        raise InvalidInput(f"{where}: {data.prompt_field} must be a text that is not empty")
    label = None
    if data.label_field:
        if data.label_field not in value:
            raise InvalidInput(f"{where}: no field {data.label_field!r}; set data.label_field to '' for data without")
        label = _label(value.pop(data.label_field), where, data.label_field)
    return PromptRow(number, prompt, label, json.dumps(value, ensure_ascii=False))


def _object(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise InvalidInput(f"{where}: key {key!r} stands twice")
        result[key] = value
    return result


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def _label(value: Any, where: str, field: str) -> str:
    """Text or number as text; integers keep every digit. Others would be graded against their Python form."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise InvalidInput(f"{where}: {field} must be a text or a number, found {json.dumps(value)}")
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    if not text.strip():
        raise InvalidInput(f"{where}: {field} is empty")
    damaged = next((c for c in text if ord(c) < 32 and c not in "\n"), None)
    if damaged is not None:
        raise InvalidInput(
            f"{where}: {field} holds the control character {damaged!r}: a single backslash in JSON? write \\\\ for \\"
        )
    return text


def visit_order(rows: int, seed: int, pass_: int, shuffle: bool) -> list[int]:
    """Row indices of one pass; a pure function, so a restarted feeder continues where it was."""
    order = list(range(rows))
    if shuffle:
        random.Random(f"{seed}/{pass_}").shuffle(order)
    return order


def group_id(pass_: int, position: int, repeat: int = 0) -> str:
    return f"{pass_}/{position}/{repeat}"


def parse_group_id(group: str) -> tuple[int, int]:
    """(pass, position)"""
    pass_, position, _ = group.split("/")
    return int(pass_), int(position)
