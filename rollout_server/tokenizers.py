"""Text to token ids and back, by the tokenizer of a Hugging Face folder."""

import functools
from collections.abc import Sequence
from pathlib import Path

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from relax_common.rows.prompt import Chat

TEXTS_REMEMBERED = 4096
THINK = "<think>"


class PromptError(ValueError):
    """The prompt cannot be used; the message says why."""


class TextTokenizer:
    """Needs no pad token: rows are ragged, and masks come from lengths."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_dir)
        begin = self._tokenizer.bos_token_id
        adds_begin = begin is not None and self._tokenizer.encode("a")[:1] == [begin]
        self._prefix: list[int] = [begin] if adds_begin else []
        # Every pass over the data repeats all prompts, and a group comes back when its lease is lost.
        self._plain = functools.lru_cache(maxsize=TEXTS_REMEMBERED)(self._encode)

    def encode_prompt(self, prompt: str | Chat) -> list[int]:
        """Token ids of a text, or of a chat as the model's template writes it."""
        if isinstance(prompt, str):
            ids = list(self._plain(prompt))
            # Exactly one begin token, even if the text spells it; never an end token, because the response follows.
            return ids if ids[:1] == self._prefix else [*self._prefix, *ids]
        if not self._tokenizer.chat_template:
            raise PromptError("the prompt is a list of messages, but the model's tokenizer has no chat template")
        # A template writes its own begin token; the tokenizer must not add a second one.
        return list(self._plain(self._in_template(prompt)))

    def begun_text(self, prompt: str | Chat) -> str:
        """The part of the model's turn that the prompt already contains, graded with the response: an assistant message
        to be continued, or a thinking block that the template (or a plain text at its end) has opened."""
        if isinstance(prompt, str):
            return THINK if prompt.rstrip().endswith(THINK) else ""
        if prompt.begun:
            return str(prompt.messages[-1].get("content") or "")
        asked, silent = self._in_template(prompt), self._in_template(prompt, asks=False)
        opening = asked[len(silent) :] if asked.startswith(silent) else ""
        return opening[opening.rfind(THINK) :] if THINK in opening else ""

    def _in_template(self, chat: Chat, *, asks: bool = True) -> str:
        """An assistant message at the end is the beginning of the model's turn; the response continues it."""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(chat.messages),
                    tools=list(chat.tools) or None,
                    tokenize=False,
                    add_generation_prompt=asks and not chat.begun,
                    continue_final_message=chat.begun,
                    **chat.options,
                )
            )
        except (TemplateError, TypeError, ValueError, AttributeError) as error:
            raise PromptError(f"the chat template refuses the messages: {str(error).splitlines()[0]}") from error

    def decode_responses(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """The text of each response without special tokens."""
        ids = [list(each) for each in responses]
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or self._tokenizer.clean_up_tokenization_spaces:
            return [str(self._tokenizer.decode(each, skip_special_tokens=True)) for each in ids]
        # What `decode` calls in the end, for all of them at once: a group's texts are a sizeable part of its cost.
        return list(backend.decode_batch(ids, skip_special_tokens=True))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))
