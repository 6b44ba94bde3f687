"""One row of the data, from the fields of its file to what a prompt group carries."""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from relax_common.errors import InvalidInput
from relax_common.recipe.schema import Data

ALL = "*"
Message = dict[str, Any]


@dataclass(frozen=True)
class PromptRow:
    """`where` names file and line, for people. A prompt is a text, or chat messages as the model's template takes
    them; if the last one is the assistant's, the response goes on in its middle."""

    where: str
    prompt: str | list[Message]
    label: str | None
    metadata_json: str


def prompt_row(data: Data, where: str, values: Mapping[str, Any]) -> PromptRow:
    """By the field map of the recipe. Raises InvalidInput in one line."""
    left, field = dict(values), data.prompt_field
    prompt = as_prompt(data, _take(left, field, where, "data.prompt_field"), f"{where}: {field}")
    label = None
    if data.label_field:
        remedy = "data.label_field to '' for data without"
        label = label_text(_take(left, data.label_field, where, remedy), f"{where}: {data.label_field}")
    return PromptRow(where, prompt, label, _metadata(data, left, where))


def as_prompt(data: Data, value: Any, where: str) -> str | list[Message]:
    """A text, inside a chat where the recipe says so, or a list of messages."""
    if isinstance(value, list):
        if not value:
            raise InvalidInput(f"{where} is an empty list of messages")
        messages = [_message(each, f"{where}[{index}]") for index, each in enumerate(value)]
        return [*_system(data), *messages] if messages[0]["role"] != "system" else messages
    if not isinstance(value, str) or not value.strip():
        raise InvalidInput(f"{where} must be a text that is not empty, or a list of chat messages")
    return [*_system(data), {"role": "user", "content": value}] if data.as_chat else value


def _system(data: Data) -> list[Message]:
    return [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []


def _message(value: Any, where: str) -> Message:
    """Columnar files fill up the keys that a message lacks with nulls: those are no keys."""
    if not isinstance(value, dict):
        raise InvalidInput(f"{where} must be a message, found {type(value).__name__}")
    message = {key: each for key, each in value.items() if each is not None}
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise InvalidInput(f"{where} has no role")
    content = message.setdefault("content", "")
    if not isinstance(content, str | list):
        raise InvalidInput(f"{where}: content must be a text or a list of parts, found {type(content).__name__}")
    return message


def label_text(value: Any, where: str) -> str:
    """Text or number as text; integers keep every digit. Others would be graded against their Python form."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal) or value != value:
        raise InvalidInput(f"{where} must be a text or a number, found {_shown(value)}")
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    if not text.strip():
        raise InvalidInput(f"{where} is empty")
    damaged = next((c for c in text if ord(c) < 32 and c not in "\n"), None)
    if damaged is not None:
        raise InvalidInput(
            f"{where} holds the control character {damaged!r}: a single backslash in JSON? write \\\\ for \\"
        )
    return text


def _take(values: dict[str, Any], field: str, where: str, remedy: str) -> Any:
    if field not in values:
        raise InvalidInput(
            f"{where}: no field {field!r}; it has {', '.join(sorted(values)) or 'none'}" + (f"; set {remedy}")
        )
    return values.pop(field)


def _metadata(data: Data, values: Mapping[str, Any], where: str) -> str:
    named = [*values] if ALL in data.metadata_fields else [*data.metadata_fields]
    wanted = {}
    for field in dict.fromkeys([*named, *data.media_fields]):
        is_media = field in data.media_fields
        if field not in values:
            key = "data.media_fields" if is_media else "data.metadata_fields"
            raise InvalidInput(f"{where}: no field {field!r} of {key}")
        if not is_media:
            wanted[field] = values[field]
        elif values[field] is not None:
            wanted[field] = _media(values[field], f"{where}: {field}")
    try:
        return json.dumps(wanted, ensure_ascii=False, allow_nan=False, default=_plain)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{where}: metadata cannot be carried: {error}; see data.metadata_fields") from error


def _media(value: Any, where: str) -> Any:
    """A path or URL stays what it is; bytes, also in the {bytes, path} of an image column, become a data URI."""
    if isinstance(value, list):
        return [_media(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, dict) and value.keys() <= {"bytes", "path"}:
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return "data:application/octet-stream;base64," + base64.b64encode(value).decode()
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"{where} must name media by path, URL, data URI or bytes, found {_shown(value)}")
    return value


def _plain(value: Any) -> str:
    """What columnar files know beyond JSON."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    kind = "bytes, which are for data.media_fields" if isinstance(value, bytes) else type(value).__name__
    raise TypeError(f"it holds {kind}")


def _shown(value: Any) -> str:
    return json.dumps(value, default=repr)[:80]
