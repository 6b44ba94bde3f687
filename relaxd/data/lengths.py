"""Tokens of prompts, counted as the rollout server will encode them, without torch or transformers."""

from __future__ import annotations

import datetime
import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from relax_common.errors import InvalidInput
from relax_common.json_types import JsonMapping, JsonObject, JsonValue
from relax_common.recipe import Recipe
from relax_common.rows.prompt import Chat, Message
from relaxd.data.prompts import Prompts, source_name
from relaxd.data.row import PromptRow

_GENERATION = re.compile(r"\{%(?P<left>-?)\s*(?P<end>end)?generation\s*(?P<right>-?)%\}")
_MARK = "CONTINUE_FROM_HERE "  # its space shows whether the template trims messages
_INVISIBLE = "\u2060"
_NEEDED = ("tokenizers", "jinja2")
Render = Callable[[Chat], str]


def fit_lengths(recipe: Recipe, rows: Sequence[PromptRow]) -> Prompts:
    """Rows within data.prompt_tokens_max; a longer one is refused or left out and counted, as the recipe says.

    If tokenizers or jinja2 is missing, "error" is left to the rollout server, which refuses prompt by prompt.
    """
    data, folder = recipe.data, recipe.model.path
    if not (folder / "tokenizer.json").exists():
        raise InvalidInput(f"model.path = {folder}: no tokenizer.json")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        if data.over_length == "drop":
            raise InvalidInput(f"data.over_length = 'drop' needs {missing[0]}: pip install 'relax-rl[data]'")
        return Prompts(list(rows))
    count = token_counter(folder)
    if data.escape_control_tokens:
        rows = _without_control_tokens(rows, folder)
    kept = []
    for row in rows:
        tokens = count(row)
        if tokens <= data.prompt_tokens_max:
            kept.append(row)
        elif data.over_length == "error":
            raise InvalidInput(
                f"{row.where}: the prompt has {tokens} tokens, data.prompt_tokens_max is {data.prompt_tokens_max}; "
                "data.over_length = 'drop' leaves such rows out"
            )
    left_out = len(rows) - len(kept)
    if not kept:
        raise InvalidInput(
            f"{source_name(data)}: all {left_out} prompts have more than data.prompt_tokens_max = "
            f"{data.prompt_tokens_max} tokens"
        )
    reason = f"longer than data.prompt_tokens_max = {data.prompt_tokens_max} tokens"
    return Prompts(kept, {reason: left_out} if left_out else {})


def _without_control_tokens(rows: Sequence[PromptRow], folder: Path) -> list[PromptRow]:
    """Messages with the model's control tokens broken up; a prompt that is not a chat stays as it is."""
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = [each["content"] for each in stored.get("added_tokens") or [] if each.get("special")]
    if not tokens:
        return list(rows)
    spelled = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))

    def escaped(message: Message) -> Message:
        text = spelled.sub(lambda token: f"{token[0][0]}{_INVISIBLE}{token[0][1:]}", message["content"])
        return {**message, "content": text}

    return [
        replace(row, prompt=replace(row.prompt, messages=[escaped(each) for each in row.prompt.messages]))
        if isinstance(row.prompt, Chat)
        else row
        for row in rows
    ]


def token_counter(folder: Path) -> Callable[[PromptRow], int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = _tokenizer_config(folder)
    begin = tokenizer.token_to_id(_token(config.get("bos_token")) or "")
    adds_begin = begin is not None and tokenizer.encode("a").ids[:1] == [begin]
    template = _template(folder, config)
    render = None if template is None else _renderer(folder, template, config)

    def count(row: PromptRow) -> int:
        if isinstance(row.prompt, str):
            ids = tokenizer.encode(row.prompt, add_special_tokens=False).ids
            return len(ids) + (adds_begin and ids[:1] != [begin])
        if render is None:
            raise InvalidInput(f"{row.where}: chat messages need a chat template, model.path = {folder} has none")
        return len(tokenizer.encode(_rendered(render, row.prompt, row.where), add_special_tokens=False).ids)

    return count


def _rendered(render: Render, chat: Chat, where: str) -> str:
    """The rendered prompt. It ends where the response begins: after the template's opening of an assistant's turn, or
    after the message that the response continues."""
    from jinja2 import TemplateError

    messages = list(chat.messages)
    last = messages[-1]
    shown = [*messages[:-1], {**last, "content": f"{last['content']}{_MARK}"}] if chat.begun else messages
    try:
        text = render(replace(chat, messages=shown))
    except (TemplateError, TypeError, ValueError) as error:
        raise InvalidInput(f"{where}: the model's chat template refuses it: {error}") from error
    if not chat.begun:
        return text
    before, mark, after = text.rpartition(_MARK.strip())
    if not mark:
        raise InvalidInput(
            f"{where}: the chat template does not render the last message, so a response cannot continue it"
        )
    return before if after.startswith(" ") else before.rstrip()


def _renderer(folder: Path, template: str, config: JsonMapping) -> Render:
    """A function that renders chats, with the extensions and helpers that templates of published models use."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": _now}
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {name: token for name in names if (token := _token(config.get(name)))}
    try:
        compiled = environment.from_string(_GENERATION.sub(_as_condition, template))
    except TemplateError as error:
        raise InvalidInput(f"model.path = {folder}: chat template: {error}") from error

    def render(chat: Chat) -> str:
        given = {"tools": list(chat.tools) or None, **tokens, **chat.options}
        return str(compiled.render(messages=list(chat.messages), add_generation_prompt=not chat.begun, **given))

    return render


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _as_condition(tag: re.Match[str]) -> str:
    """Templates mark what the model wrote with a tag that transformers defines; it changes no text."""
    body = "endif" if tag["end"] else "if true"
    return f"{{%{tag['left']} {body} {tag['right']}%}}"


def _template(folder: Path, config: JsonMapping) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        found = next((each["template"] for each in found if each.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _tokenizer_config(folder: Path) -> JsonObject:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInput(f"{path}: not valid JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def _token(value: JsonValue) -> str | None:
    """The text of a token, which is given as a text or as an object with its content."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
