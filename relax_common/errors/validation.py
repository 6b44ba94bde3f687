"""Validation errors as one line: where, what, and the nearest known key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError


def one_line(error: ValidationError, cls: type[BaseModel], sources: Mapping[str, str] | None = None) -> str:
    """First error of a validation as one line; counts the others."""
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        text = f"unknown key {path!r}" + _nearest(first["loc"], cls)
    elif first["type"] == "value_error":
        text = (f"{path}: " if path else "") + str(first["ctx"]["error"])
    else:
        text = f"{path} = {_shown(first['input'])}: {first['msg'][0].lower()}{first['msg'][1:]}"
    source = (sources or {}).get(str(first["loc"][0])) if first["loc"] else None
    more = len(error.errors()) - 1
    return text + (f" (from {source})" if source else "") + (f" (and {more} more)" if more else "")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _nearest(location: tuple[int | str, ...], cls: type[BaseModel]) -> str:
    section: type[BaseModel] = cls
    for part in location[:-1]:
        annotation = section.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return ""
        section = annotation
    key = str(location[-1])
    near = difflib.get_close_matches(key, section.model_fields, n=1, cutoff=0.5)
    where = next((name for name, field in cls.model_fields.items() if _has_key(field.annotation, key)), None)
    if near:
        return f": did you mean {'.'.join([*map(str, location[:-1]), near[0]])!r}?"
    if where is not None:
        return f": it belongs into section [{where}]"
    return f": known keys here are {', '.join(sorted(section.model_fields))}"


def _has_key(annotation: Any, key: str) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel) and key in annotation.model_fields
