"""Validation errors as one line: where, what, and the nearest known key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, Tag, ValidationError


def one_line(error: ValidationError, cls: type[BaseModel], sources: Mapping[str, str] | None = None) -> str:
    """First error of a validation as one line; counts the others."""
    first = error.errors()[0]
    location, section = _resolved(first["loc"], cls)
    path = ".".join(location)
    if first["type"] == "extra_forbidden":
        text = f"unknown key {path!r}" + _nearest(location, section, cls)
    elif first["type"] == "union_tag_invalid":
        context = first["ctx"]
        text = f"{path}.name = {context['tag']!r}: known are {context['expected_tags']}"
    elif first["type"] == "value_error":
        text = (f"{path}: " if path else "") + str(first["ctx"]["error"])
    else:
        text = f"{path} = {_shown(first['input'])}: {first['msg'][0].lower()}{first['msg'][1:]}"
    source = (sources or {}).get(str(first["loc"][0])) if first["loc"] else None
    more = len(error.errors()) - 1
    return text + (f" (from {source})" if source else "") + (f" (and {more} more)" if more else "")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _resolved(location: tuple[int | str, ...], cls: type[BaseModel]) -> tuple[list[str], type[BaseModel] | None]:
    """The keys of an error's location, without the tags of unions, and the section that its last key belongs to."""
    keys: list[str] = []
    section: type[BaseModel] | None = cls
    choices: dict[str, type[BaseModel]] = {}
    for number, part in enumerate(map(str, location)):
        if part in choices:
            section, choices = choices[part], {}
            continue
        keys.append(part)
        field = section.model_fields.get(part) if section is not None else None
        if field is None or number == len(location) - 1:
            continue
        choices = _choices(field.annotation)
        if not choices:
            below = field.annotation
            section = below if isinstance(below, type) and issubclass(below, BaseModel) else None
    return keys, section


def _choices(annotation: Any) -> dict[str, type[BaseModel]]:
    """Sections by tag, where a field takes one of several."""
    found = {}
    for member in get_args(annotation):
        kind, *metadata = get_args(member) or (member,)
        tag = next((each.tag for each in metadata if isinstance(each, Tag)), None)
        if tag is not None and isinstance(kind, type) and issubclass(kind, BaseModel):
            found[tag] = kind
    return found


def _nearest(location: Sequence[str], section: type[BaseModel] | None, cls: type[BaseModel]) -> str:
    if section is None:
        return ""
    key = location[-1]
    near = difflib.get_close_matches(key, section.model_fields, n=1, cutoff=0.5)
    where = next((name for name, field in cls.model_fields.items() if _has_key(field.annotation, key)), None)
    if near:
        return f": did you mean {'.'.join([*location[:-1], near[0]])!r}?"
    if where is not None:
        return f": it belongs into section [{where}]"
    return f": known keys here are {', '.join(sorted(section.model_fields))}"


def _has_key(annotation: Any, key: str) -> bool:
    kinds = _choices(annotation).values() or (annotation,)
    return any(isinstance(kind, type) and issubclass(kind, BaseModel) and key in kind.model_fields for kind in kinds)
