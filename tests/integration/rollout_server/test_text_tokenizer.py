"""Prompts become ids with exactly one begin token, whether the tokenizer or the template writes it."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from relax_common.rows.prompt import Chat, from_value, to_value
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
    assert tokenizer.encode_prompt(Chat([{"role": "user", "content": "hello world"}])) == [1, 3, 5, 6, 2, 4]


def test_a_message_that_was_begun_for_the_model_is_left_open(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "world"}, {"role": "assistant", "content": "hello"}]
    assert save(tmp_path, adds_begin=True, template=TEMPLATE).encode_prompt(Chat(chat)) == [1, 3, 6, 2, 3, 5]


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
    counted = token_counter(tmp_path)(PromptRow("here", from_value(prompt), None, "{}"))
    assert counted == len(tokenizer.encode_prompt(from_value(prompt)))


def test_a_chat_without_a_template_says_why_it_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no chat template"):
        save(tmp_path, adds_begin=True, template=None).encode_prompt(Chat([{"role": "user", "content": "x"}]))


def test_what_is_neither_a_text_nor_a_chat_is_no_prompt() -> None:
    with pytest.raises(ValueError, match="got int"):
        from_value(7)


THINKING = (
    "{% for m in messages %}<u> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<a> {% if enable_thinking is defined and not enable_thinking %}<think> </think> "
    "{% else %}<think> {% endif %}{% endif %}"
)


def test_what_the_template_has_begun_of_the_model_s_turn_is_known(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, adds_begin=True, template=THINKING)
    ask = [{"role": "user", "content": "put it between <think> and </think>"}]
    assert tokenizer.begun_text(Chat(ask)) == "<think> "
    assert tokenizer.begun_text(Chat(ask, options={"enable_thinking": False})) == "<think> </think> "
    assert tokenizer.begun_text(Chat([*ask, {"role": "assistant", "content": "It is 3"}])) == "It is 3"
    assert tokenizer.begun_text("Think aloud: <think>\n") == "<think>"
    assert tokenizer.begun_text("no <think> at the end") == ""
    assert save(tmp_path, adds_begin=True, template=TEMPLATE).begun_text(Chat(ask)) == ""


TOOLS = (
    "{% for t in tools or [] %}{{ t.name }} {% endfor %}{{ style }} {% for m in messages %}{{ m.content }} {% endfor %}"
)


def test_tools_and_options_of_a_row_are_rendered_and_counted_on_both_sides(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, adds_begin=True, template=TOOLS)
    chat = Chat([{"role": "user", "content": "hello"}], ({"name": "world"},), {"style": "hello"})
    ids = tokenizer.encode_prompt(chat)
    assert ids == [6, 5, 5]
    assert token_counter(tmp_path)(PromptRow("here", chat, None, "{}")) == len(ids)
    assert from_value(to_value(chat)) == chat


def test_responses_are_decoded_without_special_tokens(tmp_path: Path) -> None:
    assert save(tmp_path, adds_begin=True, template=None).decode_responses([[5, 6, 2], [6]]) == ["hello world", "world"]


def test_messages_that_the_template_refuses_cost_their_group_and_not_the_server(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, adds_begin=True, template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(PromptError, match="the chat template refuses the messages: roles must alternate"):
        tokenizer.encode_prompt(Chat([{"role": "user", "content": "hello"}]))
