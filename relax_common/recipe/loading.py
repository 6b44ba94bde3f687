"""Recipes from and to TOML."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
import xxhash
from pydantic import ValidationError

from relax_common.errors import InvalidInput
from relax_common.errors.validation import one_line
from relax_common.json_types import JsonObject
from relax_common.recipe.schema import Recipe

_INT_END = 1 << 63
_DEPTH_MAX = 50


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a file, apply `key.path=value` overrides, resolve paths against the file's folder."""
    try:
        text = path.read_text()
    except OSError as error:
        raise InvalidInput(f"recipe {path}: {error.strerror}") from error
    return parse_recipe(text, where=str(path), base=path.resolve().parent, overrides=overrides)


def parse_recipe(
    text: str, *, where: str = "recipe", base: Path | None = None, overrides: Sequence[str] = ()
) -> Recipe:
    """Raises InvalidInput with one line: where, which key, what to do."""
    try:
        values = tomllib.loads(text)
    except RecursionError as error:
        raise InvalidInput(f"{where}: not valid TOML: its values are nested too deeply") from error
    except ValueError as error:  # bad TOML, or a number of thousands of digits
        raise InvalidInput(f"{where}: not valid TOML: {error}") from error
    for override in overrides:
        _override(values, override)
    _check_values(values, where)
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise InvalidInput(f"{where}: {one_line(error, Recipe)}") from error
    return recipe if base is None else _resolve_paths(recipe, base)


def _check_values(values: JsonObject, where: str) -> None:
    """Refuse what no key can mean and what files or messages cannot hold."""
    left: list[tuple[str, Any, int]] = [("", values, 0)]
    while left:
        key, value, depth = left.pop()
        if depth > _DEPTH_MAX:
            raise InvalidInput(f"{where}: {key[:60]}...: values are nested too deeply")
        if isinstance(value, dict):
            left += [(f"{key}.{name}" if key else name, inner, depth + 1) for name, inner in value.items()]
        elif isinstance(value, list):
            left += [(key, inner, depth + 1) for inner in value]
        elif isinstance(value, int) and not -_INT_END <= value < _INT_END:
            raise InvalidInput(f"{where}: {key}: the number does not fit into 64 bits")
        elif isinstance(value, str) and "\0" in value:
            raise InvalidInput(f"{where}: {key}: the text has a zero byte")


def to_toml(recipe: Recipe) -> str:
    """The resolved recipe, every default included; parses back to an equal recipe."""
    return tomli_w.dumps(recipe.model_dump(mode="json"))


def recipe_digest(recipe: Recipe) -> str:
    return xxhash.xxh3_128_hexdigest(to_toml(recipe).encode())


def _override(values: JsonObject, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise InvalidInput(f"--set {override!r}: expected key=value, for example optimizer.lr=1e-4")
    *sections, leaf = _key_path(key.strip(), override)
    target = values
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise InvalidInput(f"--set {override!r}: {section} is a value, not a section")
    target[leaf] = _toml_value(text.strip())


def _key_path(key: str, override: str) -> list[str]:
    """The key as TOML reads it: a part with dots or colons is quoted."""
    try:
        value: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"--set {override!r}: {key} is not a key: {error}") from error
    path: list[str] = []
    while isinstance(value, dict):
        ((part, value),) = value.items()
        path.append(part)
    return path


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _resolve_paths(recipe: Recipe, base: Path) -> Recipe:
    model = recipe.model.model_copy(update={"path": (base / recipe.model.path).resolve()})
    data = recipe.data.model_copy(update={"path": tuple((base / path).resolve() for path in recipe.data.path)})
    reference = recipe.reference
    if reference.path:
        reference = reference.model_copy(update={"path": str((base / reference.path).resolve())})
    critic, teacher = recipe.critic, recipe.teacher
    if critic.path:
        critic = critic.model_copy(update={"path": str((base / critic.path).resolve())})
    if teacher.path:
        teacher = teacher.model_copy(update={"path": str((base / teacher.path).resolve())})
    rollout = recipe.rollout
    if rollout.engine_python:
        # Links are not resolved: the link itself is what makes it the interpreter of its environment.
        python = os.path.abspath(base / rollout.engine_python)
        rollout = rollout.model_copy(update={"engine_python": python})
    paths = {"model": model, "data": data, "reference": reference, "critic": critic, "teacher": teacher}
    paths["rollout"] = rollout
    return recipe.model_copy(update=paths)
