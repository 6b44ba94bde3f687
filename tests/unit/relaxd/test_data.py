"""Prompts: what a JSONL file may look like, what is refused with its line, and in which order a run visits it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_common.errors import InvalidInput, Precondition
from relax_common.recipe.data import Data
from relaxd.data import group_id, parse_group_id, read_prompts, visit_order


def write(tmp_path: Path, content: bytes) -> Data:
    path = tmp_path / "d.jsonl"
    path.write_bytes(content)
    return Data(path=(path,))


def test_byte_order_mark_crlf_blank_lines_and_no_final_newline_are_fine(tmp_path: Path) -> None:
    data = write(
        tmp_path,
        b'\xef\xbb\xbf{"prompt":"a","label":"1"}\r\n\r\n{"prompt":"b","label":"2"}\r\n  \r\n{"prompt":"c","label":"3"}',
    )
    rows = read_prompts(data)
    assert [(row.prompt, row.label) for row in rows] == [("a", "1"), ("b", "2"), ("c", "3")]
    assert [row.where.rpartition(", ")[2] for row in rows] == ["line 1", "line 3", "line 5"]


def test_line_separators_inside_a_text_do_not_split_a_row(tmp_path: Path) -> None:
    data = write(tmp_path, '{"prompt":"a\u2028b\x85c","label":"1"}\n'.encode())
    assert [row.prompt for row in read_prompts(data)] == ["a\u2028b\x85c"]


def test_numbers_become_labels_without_losing_a_digit(tmp_path: Path) -> None:
    lines = [{"prompt": "p", "label": value} for value in (2**80, 2**53 + 3, 72, 72.0, 0.5, -3)]
    data = write(tmp_path, "\n".join(map(json.dumps, lines)).encode())
    assert [row.label for row in read_prompts(data)] == [str(2**80), str(2**53 + 3), "72", "72", "0.5", "-3"]


def test_other_fields_travel_as_metadata(tmp_path: Path) -> None:
    data = write(tmp_path, b'{"prompt":"p","label":"1","level":3}')
    assert json.loads(read_prompts(data)[0].metadata_json) == {"level": 3}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt":"p","label":null}', "must be a text or a number, found null"),
        (b'{"prompt":"p","label":["7"]}', 'found ["7"]'),
        (b'{"prompt":"p","label":true}', "found true"),
        (b'{"prompt":"p","label":" "}', "label is empty"),
        (b'{"prompt":"p","label":NaN}', "NaN is not a JSON number"),
        (b'{"prompt":"p","label":"1","label":"2"}', "key 'label' occurs twice"),
        (b'{"prompt":"p","label":"\\frac{3}{8}"}', "single backslash"),
        (b'{"prompt":"p","label":"\\sum"}', "not valid JSON"),
        (b'{"prompt":"","label":"1"}', "must be a non-empty text"),
        (b'{"prompt":3,"label":"1"}', "must be a non-empty text"),
        (b'{"question":"p","label":"1"}', "no field 'prompt'; it has label, question"),
        (b'{"prompt":"p"}', "no field 'label'"),
        (b"[1]", "expected an object, found list"),
        (b'{"prompt":"p"', "not valid JSON"),
    ],
)
def test_a_bad_row_is_refused_with_file_and_line(tmp_path: Path, line: bytes, words: str) -> None:
    data = write(tmp_path, b'{"prompt":"fine","label":"1"}\n' + line + b"\n")
    with pytest.raises(InvalidInput) as caught:
        read_prompts(data)
    assert "d.jsonl, line 2: " in caught.value.message
    assert words in caught.value.message


@pytest.mark.parametrize("content", [b"", b"\n  \n"])
def test_an_empty_file_is_refused_and_never_a_run_of_no_steps(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InvalidInput, match="no rows"):
        read_prompts(write(tmp_path, content))


def test_a_missing_or_undecodable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        read_prompts(Data(path=(tmp_path / "none.jsonl",)))
    with pytest.raises(InvalidInput, match="not UTF-8 at byte 12"):
        read_prompts(write(tmp_path, b'{"prompt": "\xff"}'))


def test_a_label_may_be_absent_where_the_recipe_says_so(tmp_path: Path) -> None:
    data = write(tmp_path, b'{"prompt":"p"}').model_copy(update={"label_field": ""})
    assert read_prompts(data)[0].label is None


def test_each_pass_visits_every_row_once_in_an_order_of_its_own() -> None:
    first, second = visit_order(20, 3, 0, True), visit_order(20, 3, 1, True)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert first == visit_order(20, 3, 0, True)
    assert visit_order(4, 3, 0, False) == [0, 1, 2, 3]


def test_group_ids_carry_pass_and_position() -> None:
    assert parse_group_id(group_id(2, 17), rows=18) == (2, 17)


@pytest.mark.parametrize("group", ["", "evil", "0/0", "a/b/c", "-1/0/0", "0/²/0", "0/18/0", "0/1/0/0", "0/1/0\n"])
def test_a_group_that_is_not_of_the_run_s_data_is_named(group: str) -> None:
    """Its offer came from another program; relaxd broke on it with an error that named nothing."""
    with pytest.raises(Precondition, match="is not of this run's 18 rows of data: another program"):
        parse_group_id(group, rows=18)
