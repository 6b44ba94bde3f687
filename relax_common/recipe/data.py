"""What is trained on: the base checkpoint and the data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from relax_common.recipe.base import Count, Section, several


class Model(Section):
    path: Path
    """Hugging Face folder of the base checkpoint; relative to the recipe file."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of parameters in the actor and in engines, and of the weights that are published and exported. The
    optimizer's own weights and moments are float32 in either case."""


class Data(Section):
    path: Annotated[tuple[Path, ...], BeforeValidator(several)] = ()
    """JSONL, Parquet or Arrow file, folder of such files or of a dataset saved to disk, or a list of these; relative to
    the recipe file."""
    split: str = ""
    """The split to use of a dataset with several splits."""
    generator: str = ""
    """Instead of path: "reasoning_gym:NAME", or package.module:function(size, seed, **options) that yields rows."""
    generator_rows: Count = 1000
    generator_seed: Annotated[int, Field(ge=0)] = 0
    generator_options: dict[str, bool | int | float | str] = {}
    """Arguments of the generator, for example min_digits."""
    prompt_field: str = "prompt"
    """A text, or a list of chat messages; if the last one is the assistant's, the response continues it."""
    label_field: str = "label"
    """Empty: the data has no label. In each key that names fields, "a.b" is field b of the object in field a."""
    unreadable_label: Literal["error", "drop"] = "error"
    """A label that the reward cannot read is an error, with its line, or its row is left out and counted."""
    template_fields: tuple[str, ...] = ("tools", "chat_template_kwargs", "enable_thinking")
    """Fields passed to the chat template, if a row has them: `tools`, an object of options, and single options by their
    names. A row whose prompt is a text cannot have one."""
    metadata_fields: tuple[str, ...] = ("*",)
    """Fields passed to the reward; "*": all remaining fields."""
    media_fields: tuple[str, ...] = ()
    """Fields that name media by path, URL, data URI or bytes; they are passed along too."""
    as_chat: bool = False
    """A prompt that is a text becomes the user's message of a chat, which the model's template renders."""
    escape_control_tokens: bool = False
    """Break up control tokens of the model that messages spell out ("<|im_end|>"), with an invisible character;
    otherwise they become the real tokens, as in every chat template."""
    latex_escapes: Literal["error", "keep"] = "error"
    """A JSON escape that was surely meant as LaTeX (one backslash in "\\frac") is an error, with its line, or stays the
    control character that it stands for."""
    system_prompt: str = ""
    """First message of every chat that has none of its own."""
    shuffle: bool = True
    """Each pass visits the rows in a different order, which is a function of seed and pass."""
    passes: Annotated[int, Field(ge=0)] = 0
    """Passes over the data; 0: as many as total_steps needs."""
    prompt_tokens_max: Count = 1024
    over_length: Literal["error", "drop"] = "error"
    """A longer prompt is an error, with its line, or left out and counted."""

    @model_validator(mode="after")
    def _one_source(self) -> Data:
        if bool(self.path) == bool(self.generator):
            raise ValueError("set either data.path or data.generator")
        if self.generator and ":" not in self.generator:
            raise ValueError(f"generator = {self.generator!r}: expected reasoning_gym:NAME or package.module:function")
        for key in ("generator_rows", "generator_seed", "generator_options"):
            if self.path and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is for data.generator, but data.path is set")
        if self.generator and self.split:
            raise ValueError("split is for data.path, but data.generator is set")
        return self
