"""Prompts that are too long for the engine's tokens: refused with their line, or left out and counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from relax_common.errors import InvalidInput
from relax_common.recipe import Recipe, parse_recipe
from relax_common.rows.prompt import Chat, from_value
from relaxd.data import PromptRow, Prompts, read_prompts
from relaxd.data.lengths import fit_lengths, token_counter
from relaxd.plan.checks import check_recipe
from relaxd.plan.model import model_sizes, tensor_shapes

WORDS = ["<unk>", "<s>", "</s>", "<u>", "<a>", "one", "two", "three"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %} <u> {%- generation -%} {{ m.content }} {%- endgeneration -%} </s>"
    "{% endfor %}{% if add_generation_prompt %} <a>{% endif %}"
)


def model(folder: Path, template: str | None = TEMPLATE) -> Path:
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(WORDS[:5])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def recipe(tmp_path: Path, prompts: list[object], **data: str | int) -> Recipe:
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"prompt": each, "label": "1"}) for each in prompts))
    keys = "\n".join(f"{key} = {value!r}" for key, value in data.items())
    return parse_recipe(
        f"""
        name = "r"
        total_steps = 1
        prompts_per_step = 1
        samples_per_prompt = 2
        [model]
        path = "m"
        [data]
        path = ["d.jsonl"]
        {keys}
        """,
        base=tmp_path,
    )


def fitted(recipe: Recipe) -> Prompts:
    return fit_lengths(recipe, read_prompts(recipe.data))


def test_a_long_prompt_is_refused_with_its_line(tmp_path: Path) -> None:
    model(tmp_path / "m")
    asked = recipe(tmp_path, ["one", "one two three"], prompt_tokens_max=3)
    with pytest.raises(InvalidInput, match=r"d.jsonl, line 2: the prompt has 4 tokens, data.prompt_tokens_max is 3"):
        fitted(asked)


def test_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    model(tmp_path / "m")
    prompts = ["one", "one two three", "two", "three two one"]
    kept = fitted(recipe(tmp_path, prompts, prompt_tokens_max=3, over_length="drop"))
    assert [row.prompt for row in kept.rows] == ["one", "two"]
    assert kept.line() == "2 prompts, 2 left out: longer than data.prompt_tokens_max = 3 tokens"
    with pytest.raises(InvalidInput, match=r"all 4 prompts have more than data.prompt_tokens_max = 1 tokens"):
        fitted(recipe(tmp_path, prompts, prompt_tokens_max=1, over_length="drop"))


def test_what_is_left_must_fill_a_step(tmp_path: Path) -> None:
    model(tmp_path / "m")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "hidden_size": 1,
        "intermediate_size": 1,
        "vocab_size": 8,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    shapes = tensor_shapes(model_sizes(config))
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "m/model.safetensors")
    data = {"prompt_tokens_max": 3, "over_length": "drop", "passes": 1}
    _, prompts = check_recipe(recipe(tmp_path, ["one", "one two three"], **data))
    assert len(prompts.rows) == 1
    two_a_step = recipe(tmp_path, ["one", "one two three"], **data).model_copy(update={"prompts_per_step": 2})
    with pytest.raises(InvalidInput, match="1 rows x 1 passes do not fill one step of 2 prompts"):
        check_recipe(two_a_step)


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("one two", 3),  # one begin token and no end token
        ("<s> one", 2),
        ([{"role": "user", "content": "one two"}], 6),
        ([{"role": "user", "content": "one"}, {"role": "assistant", "content": "two three"}], 7),
    ],
)
def test_tokens_are_those_that_the_engine_will_see(tmp_path: Path, prompt: Any, tokens: int) -> None:
    assert token_counter(model(tmp_path / "m"))(PromptRow("here", from_value(prompt), None, "{}")) == tokens


def test_a_chat_needs_a_template_that_takes_it(tmp_path: Path) -> None:
    chat = PromptRow("d.jsonl, line 4", Chat([{"role": "user", "content": "one"}]), None, "{}")
    with pytest.raises(InvalidInput, match=r"line 4: chat messages need a chat template, model.path = .* has none"):
        token_counter(model(tmp_path / "bare", None))(chat)
    with pytest.raises(InvalidInput, match="line 4: the model's chat template refuses it: roles must alternate"):
        token_counter(model(tmp_path / "strict", "{{ raise_exception('roles must alternate') }}"))(chat)
    with pytest.raises(InvalidInput, match="chat template: "):
        token_counter(model(tmp_path / "broken", "{% if %}"))
    begun = PromptRow("d.jsonl, line 5", Chat([{"role": "assistant", "content": "one"}]), None, "{}")
    with pytest.raises(InvalidInput, match="line 5: the chat template does not render the last message"):
        token_counter(model(tmp_path / "mute", "<u>"))(begun)


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d.parquet").write_bytes(b"x")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    asked = recipe(tmp_path, ["one"], over_length="drop")
    with pytest.raises(InvalidInput, match=r"needs tokenizers: pip install 'relax-rl\[data\]'"):
        fitted(asked)
    with pytest.raises(InvalidInput, match=r"needs pyarrow: pip install 'relax-rl\[data\]'"):
        read_prompts(asked.data.model_copy(update={"path": (tmp_path / "d.parquet",)}))
    with pytest.raises(InvalidInput, match=r"needs reasoning-gym: pip install 'relax-rl\[tasks\]'"):
        read_prompts(asked.data.model_copy(update={"path": (), "generator": "reasoning_gym:chain_sum"}))


def test_the_controller_starts_without_the_libraries_of_data() -> None:
    code = (
        "import sys, relaxd.plan.checks; "
        "sys.exit(bool({'pyarrow', 'reasoning_gym', 'tokenizers', 'jinja2', 'torch'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
