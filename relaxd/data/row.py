"""One row of the data, from the fields of its file to what a prompt group carries."""

from __future__ import annotations

import base64
import copy
import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from relax_common.errors import InvalidInput
from relax_common.json_types import JsonMapping, JsonObject, JsonValue
from relax_common.recipe.data import Data
from relax_common.rows.prompt import Chat, to_value
from relaxd.data.messages import chat_prompt, shown

ALL = "*"


class DecimalText(float):
    """A number that remembers how it is written in its file: as a label, 0.00001 must not become 1e-05."""

    text: str

    @classmethod
    def read(cls, text: str) -> DecimalText:
        number = cls(text)
        number.text = text
        return number


@dataclass(frozen=True)
class PromptRow:
    """`where` names file and line, for people."""

    where: str
    prompt: str | Chat
    label: str | None
    metadata_json: str

    @property
    def prompt_json(self) -> str:
        return json.dumps(to_value(self.prompt), ensure_ascii=False)


def prompt_row(data: Data, where: str, values: JsonMapping) -> PromptRow:
    """Build the row by the field map of the recipe. Raises InvalidInput in one line."""
    left, field = dict(values), data.prompt_field
    value = _take(left, field, where, "data.prompt_field")
    template_fields = {name: left.pop(name) for name in data.template_fields if name in left}
    prompt = chat_prompt(data, value, template_fields, f"{where}: {field}", where)
    label = None
    if data.label_field:
        remedy = "data.label_field to '' for data without"
        label = label_text(_take(left, data.label_field, where, remedy), f"{where}: {data.label_field}")
    return PromptRow(where, prompt, label, _metadata(data, left, where))


def label_text(value: object, where: str) -> str:
    """A text or number as text; numbers keep every digit. Other types are refused: they would be graded by their Python
    form."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal) or value != value:
        raise InvalidInput(f"{where} must be a text or a number, found {shown(value)}")
    if isinstance(value, float) and value.is_integer():
        text = str(int(value))
    else:
        text = value.text if isinstance(value, DecimalText) else str(value)
    if not text.strip():
        raise InvalidInput(f"{where} is empty")
    damaged = next((c for c in text if ord(c) < 32 and c not in "\n"), None)
    if damaged is not None:
        raise InvalidInput(
            f"{where} holds the control character {damaged!r}: a single backslash in JSON? write \\\\ for \\"
        )
    return text


def _take(values: JsonObject, field: str, where: str, remedy: str = "", *, key: str = "") -> JsonValue:
    """Removes and returns a field; "a.b" is field b of the object in field a, unless a field is called "a.b"."""
    if field in values:
        return values.pop(field)
    outer, *inner = field.split(".")
    if inner and isinstance(values.get(outer), Mapping):
        holder: JsonValue = copy.deepcopy(values[outer])
        values[outer] = holder
        for name in inner[:-1]:
            holder = holder.get(name) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and inner[-1] in holder:
            return holder.pop(inner[-1])
    has = ", ".join(sorted(_names(values))) or "none"
    wanted = f"no field {field!r}" + (f" of {key}" if key else "")
    raise InvalidInput(f"{where}: {wanted}; it has {has}" + (f"; set {remedy}" if remedy else ""))


def _names(values: JsonMapping) -> list[str]:
    """The names of fields and, for objects, those of their fields."""
    inner = [f"{name}.{each}" for name, value in values.items() if isinstance(value, Mapping) for each in value]
    return [*values, *inner]


def _metadata(data: Data, values: JsonMapping, where: str) -> str:
    left, wanted = dict(values), {}
    for field in dict.fromkeys(data.media_fields):
        value = _take(left, field, where, key="data.media_fields")
        if value is not None:
            wanted[field] = _media(value, f"{where}: {field}")
    named = [*left] if ALL in data.metadata_fields else data.metadata_fields
    for field in dict.fromkeys(named):
        if field not in data.media_fields:
            wanted[field] = _take(left, field, where, key="data.metadata_fields")
    try:
        return json.dumps(wanted, ensure_ascii=False, allow_nan=False, default=_plain)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{where}: metadata cannot be carried: {error}; see data.metadata_fields") from error


def _media(value: object, where: str) -> JsonValue:
    """A path or URL stays what it is; bytes, also in the {bytes, path} of an image column, become a data URI."""
    if isinstance(value, list):
        return [_media(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, dict) and value.keys() <= {"bytes", "path"}:
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return "data:application/octet-stream;base64," + base64.b64encode(value).decode()
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"{where} must name media by path, URL, data URI or bytes, found {shown(value)}")
    return value


def _plain(value: object) -> str:
    """Converts the types that columnar files have beyond JSON."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    kind = "bytes, which are for data.media_fields" if isinstance(value, bytes) else type(value).__name__
    raise TypeError(f"it holds {kind}")
