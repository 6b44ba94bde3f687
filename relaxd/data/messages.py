"""Chat messages of a row, checked part by part: what a template would render wrongly is refused by name."""

from __future__ import annotations

import json

from relax_common.errors import InvalidInput
from relax_common.json_types import JsonMapping, JsonObject, JsonValue
from relax_common.recipe.data import Data
from relax_common.rows.prompt import Chat, Message

TOOLS, OPTIONS = "tools", "chat_template_kwargs"


def chat_prompt(data: Data, value: object, template_fields: JsonMapping, where: str, row: str) -> str | Chat:
    """A text, inside a chat where the recipe says so, or a chat with the tools and options of its row.

    template_fields: values of the row's fields in data.template_fields. row: names the row in error messages.
    """
    given = {name: each for name, each in template_fields.items() if each is not None}
    if isinstance(value, list):
        if not value:
            raise InvalidInput(f"{where} is an empty list of messages")
        messages = [_message(each, f"{where}[{index}]") for index, each in enumerate(value)]
        messages = [*_system(data), *messages] if messages[0]["role"] != "system" else messages
    elif not isinstance(value, str) or not value.strip():
        raise InvalidInput(f"{where} must be a non-empty text or a list of chat messages")
    elif not data.as_chat:
        if given:
            raise InvalidInput(
                f"{row}: field {next(iter(given))!r} is for the chat template, but the prompt is a text: set "
                "data.as_chat, or data.template_fields without it"
            )
        return value
    else:
        messages = [*_system(data), {"role": "user", "content": value}]
    tools = _tools(given.pop(TOOLS, None), f"{row}: {TOOLS}")
    options = _options(given.pop(OPTIONS, None), f"{row}: {OPTIONS}")
    return Chat(messages, tools, {**options, **given})


def _system(data: Data) -> list[Message]:
    return [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []


def _message(value: object, where: str) -> Message:
    """Columnar files add a null for each key that a message lacks; such keys are ignored."""
    if not isinstance(value, dict):
        raise InvalidInput(f"{where} must be a message, found {type(value).__name__}")
    message = {key: without_nulls(each) for key, each in value.items() if each is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidInput(f"{where} has no role")
    content = _content(message.get("content"), where)
    if not content.strip() and not (role == "assistant" and message.get("tool_calls")):
        raise InvalidInput(f"{where}: the content of the {role}'s message is empty")
    return {**message, "content": content}


def _content(value: object, where: str) -> str:
    """Joins text parts into one text: many templates would render a list of parts as Python prints it."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise InvalidInput(f"{where}: content must be a text or a list of parts, found {type(value).__name__}")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidInput(f"{where}: part {index} of its content is of type {kind!r}; only text is supported here")
        texts.append(part["text"])
    return "".join(texts)


def without_nulls(value: object) -> JsonValue:
    """The same without fields of null, at any depth: columnar files give every object the fields of all others."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _tools(value: object, where: str) -> tuple[JsonObject, ...]:
    tools = _json(value, where)
    if tools is None:
        return ()
    if not isinstance(tools, list) or not all(isinstance(each, dict) and each for each in tools):
        raise InvalidInput(f"{where} must be a list of function schemas, found {shown(tools)}")
    return tuple(without_nulls(each) for each in tools)


def _options(value: object, where: str) -> JsonObject:
    options = _json(value, where)
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise InvalidInput(f"{where} must be an object of the template's variables, found {shown(options)}")
    found: JsonObject = without_nulls(options)
    return found


def _json(value: object, where: str) -> JsonValue:
    """Columnar files often keep such a field as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as error:
        raise InvalidInput(f"{where} is a text, but not JSON: {error}") from error


def shown(value: object) -> str:
    return json.dumps(value, default=repr)[:80]
