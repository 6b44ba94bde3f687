"""Prompts become ids with exactly one begin token, whoever writes it."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from relaxd.data import PromptRow
from relaxd.data.lengths import token_counter
from rollout_server.tokenizers import PromptError, TextTokenizer

WORDS = ["<unk>", "<s>", "</s>", "<u>", "<a>", "hello", "world"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %} <u> {{ m.content }} </s>{% endfor %}"
    "{% if add_generation_prompt %} <a>{% endif %}"
)

TRIMMING = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<s> <u> world </s> {% endif %}"
    "<u> {{ m.content | trim }} </s> {% endfor %}{% if add_generation_prompt %}<a> hello{% endif %}"
)


def save(folder: Path, *, adds_begin: bool, template: str | None) -> TextTokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    made.save_pretrained(folder)
    return TextTokenizer(folder)


@pytest.mark.parametrize(("prompt", "ids"), [("hello world", [1, 5, 6]), ("<s> hello", [1, 5])])
def test_a_text_gets_one_begin_token_and_no_end_token(tmp_path: Path, prompt: str, ids: list[int]) -> None:
    assert save(tmp_path, adds_begin=True, template=None).encode_prompt(prompt) == ids


def test_a_tokenizer_that_adds_nothing_adds_nothing(tmp_path: Path) -> None:
    assert save(tmp_path, adds_begin=False, template=None).encode_prompt("hello world") == [5, 6]


@pytest.mark.parametrize("adds_begin", [True, False])
def test_a_template_that_writes_the_begin_token_is_not_doubled(tmp_path: Path, adds_begin: bool) -> None:
    tokenizer = save(tmp_path, adds_begin=adds_begin, template=TEMPLATE)
    assert tokenizer.encode_prompt([{"role": "user", "content": "hello world"}]) == [1, 3, 5, 6, 2, 4]


def test_a_message_that_was_begun_for_the_model_is_left_open(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "world"}, {"role": "assistant", "content": "hello"}]
    assert save(tmp_path, adds_begin=True, template=TEMPLATE).encode_prompt(chat) == [1, 3, 6, 2, 3, 5]


@pytest.mark.parametrize(
    "prompt",
    [
        "hello world",
        "<s> hello",
        [{"role": "user", "content": "hello"}],
        [{"role": "system", "content": "world"}, {"role": "user", "content": "hello"}],
        [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world hello "}],
        [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello hello"}],
    ],
)
@pytest.mark.parametrize("template", [TEMPLATE, TRIMMING])
def test_the_controller_counts_the_tokens_that_the_engine_gets(tmp_path: Path, prompt: Any, template: str) -> None:
    tokenizer = save(tmp_path, adds_begin=True, template=template)
    counted = token_counter(tmp_path)(PromptRow("here", prompt, None, "{}"))
    assert counted == len(tokenizer.encode_prompt(prompt))


@pytest.mark.parametrize(
    ("prompt", "message"), [([{"role": "user", "content": "x"}], "no chat template"), (7, "got int")]
)
def test_a_prompt_that_cannot_be_used_says_why(tmp_path: Path, prompt: object, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        save(tmp_path, adds_begin=True, template=None).encode_prompt(prompt)


def test_responses_are_decoded_without_special_tokens(tmp_path: Path) -> None:
    assert save(tmp_path, adds_begin=True, template=None).decode_responses([[5, 6, 2], [6]]) == ["hello world", "world"]


def test_messages_that_the_template_refuses_cost_their_group_and_not_the_server(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, adds_begin=True, template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(PromptError, match="the chat template refuses the messages: roles must alternate"):
        tokenizer.encode_prompt([{"role": "user", "content": "hello"}])
