"""Generated rows, from reasoning-gym or a function: the same ones each time they are asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from relax_common.errors import InvalidInput
from relax_common.recipe.data import Data
from relax_common.rows.prompt import Chat
from relaxd.data import read_prompts


def sums(size: int, seed: int, start: int = 0) -> Iterator[dict[str, object]]:
    n = start + seed
    while True:  # more than asked for: the caller stops
        yield {"prompt": f"{n} + 1 =", "label": n + 1, "size": size}
        n += 1


def broken(size: int, seed: int) -> Iterator[dict[str, object]]:
    yield {"prompt": "fine", "label": 1}
    raise RuntimeError("the source ran dry")


def no_mapping(size: int, seed: int) -> list[str]:
    return ["x"]


def here(name: str) -> str:
    return f"{__name__}:{name}"


def test_a_function_yields_rows_for_size_seed_and_options() -> None:
    data = Data(generator=here("sums"), generator_rows=3, generator_seed=4, generator_options={"start": 10})
    rows = read_prompts(data)
    assert [(row.prompt, row.label) for row in rows] == [("14 + 1 =", "15"), ("15 + 1 =", "16"), ("16 + 1 =", "17")]
    assert json.loads(rows[0].metadata_json) == {"size": 3}
    assert rows == read_prompts(data)


@pytest.mark.parametrize(
    ("generator", "words"),
    [
        (here("broken"), "RuntimeError: the source ran dry"),
        (here("no_mapping"), "row 1: expected a mapping of fields, found str"),
        (here("absent"), "has no function 'absent'"),
        ("no_such_package:rows", "cannot import no_such_package"),
        ("reasoning_gym:no_such_set", "no_such_set"),
    ],
)
def test_a_generator_that_cannot_be_used_says_why(generator: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_prompts(Data(generator=generator, generator_rows=2))
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_puzzles_carry_their_entry_and_have_no_label_where_many_answers_are_right() -> None:
    rows = read_prompts(Data(generator="reasoning_gym:graph_color", generator_rows=2, generator_seed=11, as_chat=True))
    assert [row.label for row in rows] == [None, None]
    carried = json.loads(rows[1].metadata_json)["reasoning_gym"]
    assert carried["dataset"] == "graph_color"
    assert rows[1].prompt == Chat([{"role": "user", "content": carried["entry"]["question"]}])
    sums_of_two = Data(generator="reasoning_gym:chain_sum", generator_rows=2, generator_options={"min_digits": 2})
    assert all(row.label and row.label.lstrip("-").isdigit() for row in read_prompts(sums_of_two))
