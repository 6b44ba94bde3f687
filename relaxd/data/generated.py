"""Rows that are generated: by reasoning-gym, or by a function of the user's."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from relax_common.errors import InvalidInput
from relax_common.json_types import JsonObject, JsonValue
from relax_common.recipe.data import Data
from relaxd.data.messages import chat_prompt
from relaxd.data.row import PromptRow, label_text, prompt_row

REASONING_GYM = "reasoning_gym:"


def generate_rows(data: Data) -> Iterator[PromptRow]:
    """The same rows for the same keys: a restarted controller asks for them again."""
    if data.generator.startswith(REASONING_GYM):
        return _reasoning_gym(data, data.generator.removeprefix(REASONING_GYM))
    return _from_function(data)


def _from_function(data: Data) -> Iterator[PromptRow]:
    function, arguments = _function(data.generator), _arguments(data)
    try:
        rows = list(itertools.islice(function(**arguments), data.generator_rows))
    except Exception as error:
        raise InvalidInput(f"data.generator {data.generator}: {type(error).__name__}: {_first(error)}") from error
    for number, row in enumerate(rows, start=1):
        where = f"data.generator {data.generator}, row {number}"
        if not isinstance(row, Mapping):
            raise InvalidInput(f"{where}: expected a mapping of fields, found {type(row).__name__}")
        yield prompt_row(data, where, row)


def _arguments(data: Data) -> JsonObject:
    return {"size": data.generator_rows, "seed": data.generator_seed, **data.generator_options}


def _function(path: str) -> Callable[..., Any]:
    module_name, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise InvalidInput(f"data.generator {path}: cannot import {module_name}: {error}") from error
    if not callable(function):
        raise InvalidInput(f"data.generator {path}: {module_name} has no function {name!r}")
    found: Callable[..., Any] = function
    return found


def _reasoning_gym(data: Data, name: str) -> Iterator[PromptRow]:
    """Metadata holds the whole entry, for the reward `reasoning_gym`. There is no label: some sets have no single
    answer."""
    try:
        reasoning_gym: Any = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise InvalidInput(
            f"data.generator {data.generator}: it needs reasoning-gym: pip install 'relax-rl[tasks]'"
        ) from error
    try:
        entries = list(reasoning_gym.create_dataset(name, **_arguments(data)))
    except Exception as error:
        raise InvalidInput(f"data.generator {data.generator}: {_first(error)}") from error
    for number, entry in enumerate(entries, start=1):
        where = f"data.generator {data.generator}, row {number}"
        prompt = chat_prompt(data, entry["question"], {}, f"{where}: question", where)
        answer = None if entry["answer"] is None else label_text(entry["answer"], f"{where}: answer")
        carried = json.dumps({"reasoning_gym": {"dataset": name, "entry": entry}}, ensure_ascii=False)
        if number == 1 and answer is not None:
            _check_scorer(reasoning_gym.get_score_answer_fn(name), answer, entry, carried, data.generator)
        yield PromptRow(where, prompt, answer, carried)


def _check_scorer(score: Any, answer: str, entry: JsonValue, carried: str, generator: str) -> None:
    """Entries reach the scorer as JSON. A set whose own answer scores less after that conversion cannot be trained
    on."""
    there = json.loads(carried)["reasoning_gym"]["entry"]
    before, after = score(answer, entry), score(answer, there)
    if before != after:
        raise InvalidInput(
            f"data.generator {generator}: its own answer scores {before}, but {after} once its entry has been through "
            "JSON; this set cannot be used"
        )


def _first(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0]
