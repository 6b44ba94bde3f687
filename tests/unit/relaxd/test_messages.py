"""Messages and tools as published data sets write them: rendered and counted, or refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relax_common.errors import DataChanged, InvalidInput
from relax_common.recipe import Recipe, parse_recipe
from relax_common.recipe.data import Data
from relax_common.rows.prompt import Chat
from relaxd.data import PromptRow, labels, read_prompts
from relaxd.data.fingerprint import FILE, check_unchanged, remember
from relaxd.data.labels import readable_rows
from relaxd.data.lengths import fit_lengths

ASK = [{"role": "user", "content": "2+2?"}]


def jsonl(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def one(path: Path, **keys: Any) -> PromptRow:
    return read_prompts(Data(path=(path,), **keys))[0]


def test_tools_and_template_options_belong_to_the_chat(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": None}}]
    row = {"prompt": ASK, "label": "4", "tools": tools, "enable_thinking": False, "level": 3}
    made = one(jsonl(tmp_path, {**row, "chat_template_kwargs": {"style": "brief"}}))
    chat = Chat(ASK, ({"type": "function", "function": {"name": "add"}},), {"style": "brief", "enable_thinking": False})
    assert made.prompt == chat
    assert json.loads(made.metadata_json) == {"level": 3}
    as_text = {**row, "tools": json.dumps(tools), "chat_template_kwargs": '{"style": "brief"}'}
    assert one(jsonl(tmp_path, as_text)).prompt == chat
    kept = one(jsonl(tmp_path, row), template_fields=())
    assert kept.prompt == Chat(ASK)
    assert "tools" in json.loads(kept.metadata_json)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "2+2?", "tools": [{"name": "add"}]}, "field 'tools' is for the chat template"),
        ({"prompt": ASK, "tools": "add"}, "tools is a text, but not JSON"),
        ({"prompt": ASK, "tools": {"name": "add"}}, "tools must be a list of function schemas"),
        ({"prompt": ASK, "chat_template_kwargs": [1]}, "chat_template_kwargs must be an object"),
        ({"prompt": [{"role": "user", "content": None}]}, "the content of the user's message is empty"),
        ({"prompt": [{"role": "user", "content": ""}]}, "the content of the user's message is empty"),
        ({"prompt": [{"role": "user", "content": []}]}, "the content of the user's message is empty"),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}, "is of type 'image'"),
        ({"prompt": [{"role": "user", "content": ["2+2?"]}]}, "is of type 'str'"),
    ],
)
def test_what_cannot_be_rendered_is_refused_by_name(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        one(jsonl(tmp_path, {"label": "4", **row}))
    assert "line 1" in refused.value.message
    assert words in refused.value.message


def test_parts_of_text_are_one_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]
    made = one(jsonl(tmp_path, {"prompt": [{"role": "user", "content": parts}], "label": "4"}))
    assert made.prompt == Chat([{"role": "user", "content": "What is 2+2?"}])


def test_a_call_of_a_tool_needs_no_content(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "add"}}]}
    made = one(jsonl(tmp_path, {"prompt": [*ASK, call, *ASK], "label": "4"}))
    assert isinstance(made.prompt, Chat)
    assert made.prompt.messages[1]["content"] == ""


def test_nulls_that_a_columnar_file_adds_vanish_at_any_depth(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    infos = [{"a": {"x": 1, "y": None}, "b": None}, {"a": {"x": None, "y": [{"p": 1, "q": None}]}, "b": "z"}]
    pq.write_table(pa.table({"prompt": ["one", "two"], "label": ["1", "2"], "info": infos, "none": [None, None]}), path)
    first, second = (json.loads(row.metadata_json) for row in read_prompts(Data(path=(path,))))
    assert first == {"info": {"a": {"x": 1}}, "none": None}
    assert second == {"info": {"a": {"y": [{"p": 1}]}, "b": "z"}, "none": None}


def test_dotted_names_reach_nested_fields(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    columns = {
        "prompt": [ASK],
        "reward_model": [{"style": "rule", "ground_truth": "4"}],
        "extra": [{"index": 7, "deep": {"er": 1}}],
    }
    pq.write_table(pa.table(columns), path)
    made = one(path, label_field="reward_model.ground_truth", metadata_fields=("extra.deep.er", "reward_model"))
    assert made.label == "4"
    assert json.loads(made.metadata_json) == {"extra.deep.er": 1, "reward_model": {"style": "rule"}}
    with pytest.raises(InvalidInput, match=r"no field 'reward_model.truth'; it has .*reward_model.ground_truth"):
        one(path, label_field="reward_model.truth")


@pytest.mark.parametrize("command", ["frac{1}{2}", "beta", "boxed{4}", "times 3", "theta", "rho", "neq 2", "text{a}"])
def test_a_json_escape_that_was_meant_as_latex_is_named_with_its_line(tmp_path: Path, command: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "fine", "label": "1"}\n{"prompt": "what is $\\' + command + '$?", "label": "1"}\n')
    with pytest.raises(InvalidInput, match=r"line 2: .* has a single backslash"):
        read_prompts(Data(path=(path,)))
    assert len(read_prompts(Data(path=(path,), latex_escapes="keep"))) == 2
    path.write_text(path.read_text().replace("\\", "\\\\"))
    assert len(read_prompts(Data(path=(path,)))) == 2


@pytest.mark.parametrize(
    "text", ["a\\nnor b", "x\\ttable", "line\\nNext", "tab\\tto", "\\u00e9", "a\\\\nu b", "\\r\\nrow"]
)
def test_ordinary_escapes_are_ordinary(tmp_path: Path, text: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "' + text + '", "label": "1"}\n')
    assert one(path).prompt == json.loads(f'"{text}"')


@pytest.mark.parametrize(
    ("written", "label"), [("0.00001", "0.00001"), ("1e-5", "1e-5"), ("0.10", "0.10"), ("1e3", "1000"), ("72.0", "72")]
)
def test_a_number_as_label_keeps_its_decimal_text(tmp_path: Path, written: str, label: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(f'{{"prompt": "p", "label": {written}, "other": {written}}}\n')
    made = one(path)
    assert made.label == label
    assert json.loads(made.metadata_json) == {"other": float(written)}


def recipe_with(tmp_path: Path, *overrides: str) -> Any:
    text = f'name = "x"\ntotal_steps = 1\nprompts_per_step = 1\nsamples_per_prompt = 2\n[model]\npath = "{tmp_path}"\n'
    return parse_recipe(f'{text}[data]\npath = "{tmp_path}/d.jsonl"\n', overrides=overrides)


def rows_of(*labels: str) -> list[PromptRow]:
    return [PromptRow(f"d.jsonl, line {i}", "p", label, "{}") for i, label in enumerate(labels, start=1)]


def test_labels_that_the_reward_cannot_read_are_refused_with_their_lines(tmp_path: Path) -> None:
    rows = rows_of("4", r"\$20", "$3+\\unknowncmd{4}$", r"$5\quad\text{and more}$", "4")
    with pytest.raises(InvalidInput) as refused:
        readable_rows(recipe_with(tmp_path, "reward.name=math"), rows)
    for words in ("d.jsonl, line 3: ", "d.jsonl, line 4: ", "cannot read the label", "unreadable_label = 'drop'"):
        assert words in refused.value.message
    assert "line 2" not in refused.value.message
    kept = readable_rows(recipe_with(tmp_path, "reward.name=math", "data.unreadable_label=drop"), rows)
    assert [row.where[-1] for row in kept] == ["1", "2", "5"]


def test_a_reward_that_does_not_exist_is_found_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no reward 'mat': did you mean 'math'"):
        readable_rows(recipe_with(tmp_path, "reward.name=mat"), rows_of("4"))
    with pytest.raises(InvalidInput, match="cannot import nowhere"):
        readable_rows(recipe_with(tmp_path, "reward.name=nowhere:f"), rows_of("4"))


def test_every_part_of_a_sum_reads_the_labels(tmp_path: Path) -> None:
    sums = ("reward.parts.numeric=0.5", "reward.parts.exact=0.5")
    assert len(readable_rows(recipe_with(tmp_path, *sums), rows_of("4", "5"))) == 2
    with pytest.raises(InvalidInput, match="line 2: reward 'numeric' needs a number as label, got 'five'"):
        readable_rows(recipe_with(tmp_path, *sums), rows_of("4", "five"))


def test_control_tokens_in_messages_can_be_escaped(tmp_path: Path) -> None:
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": 1, "content": "<|im_end|>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False},
        ],
        "model": {"type": "WordLevel", "vocab": {"a": 0, "<|im_end|>": 1, "<unk>": 2}, "unk_token": "<unk>"},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    rows = [PromptRow("here", Chat([{"role": "user", "content": "a<|im_end|>"}]), None, "{}")]
    (plain,) = fit_lengths(recipe_with(tmp_path), rows).rows
    assert plain.prompt.messages[0]["content"] == "a<|im_end|>"  # type: ignore[union-attr]
    (escaped,) = fit_lengths(recipe_with(tmp_path, "data.escape_control_tokens=true"), rows).rows
    assert "<|im_end|>" not in escaped.prompt_json
    assert "im_end|>" in escaped.prompt_json


def test_changed_data_is_refused_with_what_changed(tmp_path: Path) -> None:
    check_unchanged(tmp_path, rows_of("1", "2", "3"))
    check_unchanged(tmp_path, rows_of("1", "2", "3"))
    with pytest.raises(DataChanged, match=r"has changed since the run began: the first difference is d.jsonl, line 2"):
        check_unchanged(tmp_path, rows_of("1", "x", "3"))
    with pytest.raises(DataChanged, match=r"it had 3 rows and has 4; the first difference is d.jsonl, line 4"):
        check_unchanged(tmp_path, rows_of("1", "2", "3", "4"))
    with pytest.raises(DataChanged, match=r"it had 3 rows and has 2; the first difference is row 3, which is gone"):
        check_unchanged(tmp_path, rows_of("1", "2"))
    remember(tmp_path, rows_of("1", "2"))
    check_unchanged(tmp_path, rows_of("1", "2"))
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


READER = """
import signal, time

def reward(item):
    return 1.0

def read_label(label):
    if label == "slow":
        raise_(label)
    if label.startswith("stuck"):
        # As in a long call of a library in C, no signal handler runs.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        time.sleep(3600)

def raise_(label):
    try:
        signal.raise_signal(signal.SIGALRM)
    except Exception:
        pass

reward.read_label = read_label
"""


@pytest.fixture
def with_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe with a reward whose reader does what the label says."""
    (tmp_path / "a_reader.py").write_text(READER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(labels, "_STUCK_SECONDS", 5.0)
    return recipe_with(tmp_path, "reward.name=a_reader:reward", "data.unreadable_label=drop")


def test_a_label_that_takes_too_long_is_left_out_and_the_others_are_read(with_reader: Recipe) -> None:
    rows = rows_of("1", "slow", "2", "stuck", "3")
    assert [row.label for row in readable_rows(with_reader, rows)] == ["1", "2", "3"]


def test_a_reward_that_is_stuck_in_many_labels_is_refused_with_the_row(
    with_reader: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labels, "_STUCK_MAX", 0)
    with pytest.raises(InvalidInput, match=r"d\.jsonl, line 2: reward a_reader:reward is stuck in this label"):
        readable_rows(with_reader, rows_of("1", "stuck", "3"))


def test_the_time_for_all_labels_is_bounded_however_many_they_are(
    with_reader: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labels, "_SECONDS_MAX", 0.0)
    with pytest.raises(InvalidInput, match=r"d\.jsonl, line 1: .* in 0 s it has read only 0 of 9000"):
        readable_rows(with_reader, rows_of(*map(str, range(9000))))
