"""A prompt as it travels: a text, chat messages, or a chat with what its template needs beyond the messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from relax_common.json_types import JsonMapping, JsonObject

Message = JsonObject


@dataclass(frozen=True)
class Chat:
    """`tools`: schemas of functions, as templates take them. `options`: further variables of the template, by name."""

    messages: Sequence[Message]
    tools: Sequence[JsonObject] = ()
    options: JsonMapping = field(default_factory=dict)

    @property
    def begun(self) -> bool:
        """Whether the last message is one of the assistant's, which the response continues."""
        return bool(self.messages) and self.messages[-1].get("role") == "assistant"


def to_value(prompt: str | Chat) -> object:
    """The prompt as a JSON value; a chat without tools and options is the list of its messages."""
    if isinstance(prompt, str):
        return prompt
    if not prompt.tools and not prompt.options:
        return list(prompt.messages)
    return {"messages": list(prompt.messages), "tools": list(prompt.tools), "options": dict(prompt.options)}


def from_value(value: object) -> str | Chat:
    """The reverse. Raises ValueError for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return Chat(value)
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return Chat(value["messages"], tuple(value.get("tools") or ()), value.get("options") or {})
    raise ValueError(f"a prompt is a text or a list of messages, got {type(value).__name__}")
