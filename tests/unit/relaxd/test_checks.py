"""A recipe with SGLang is refused, in one line, if its interpreter has no SGLang."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relax_common.errors import InvalidInput
from relax_common.recipe import Recipe, parse_recipe
from relaxd.plan.checks import check_engine

MINIMAL = """
name = "r"
total_steps = 3
prompts_per_step = 4
samples_per_prompt = 2
[model]
path = "m"
[data]
path = "d.jsonl"
prompt_tokens_max = 8
[rollout]
engine = "sglang"
"""


def recipe(*overrides: str) -> Recipe:
    return parse_recipe(MINIMAL, overrides=overrides)


def interpreter(folder: Path, exit_code: int) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\nexit {exit_code}\n")
    path.chmod(0o755)
    return f"rollout.engine_python={path}"


def test_an_interpreter_without_sglang_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for override, words in (
        (interpreter(tmp_path, 1), f"{tmp_path}/python has no sglang: `make sglang` installs it"),
        ("rollout.engine_python=/nowhere/python", "rollout.engine_python = /nowhere/python: No such file or directory"),
    ):
        with pytest.raises(InvalidInput) as caught:
            check_engine(recipe(override))
        assert words in caught.value.message
        assert "\n" not in caught.value.message


def test_the_daemons_own_interpreter_is_asked_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/own")
    with pytest.raises(InvalidInput, match="/nowhere/own"):
        check_engine(recipe())


def test_what_needs_no_interpreter_is_not_asked(tmp_path: Path) -> None:
    check_engine(recipe(interpreter(tmp_path, 0)))
    check_engine(recipe('rollout.engine_urls=["http://127.0.0.1:1"]'))
    check_engine(recipe("rollout.engine=torch"))
