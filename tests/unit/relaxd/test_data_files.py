"""Data in columns and folders: the same rows, the same refusals, whatever the format."""

from __future__ import annotations

import base64
import errno
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relax_common.errors import InvalidInput
from relax_common.recipe.data import Data
from relax_common.rows.prompt import Chat
from relaxd.data import read_prompts, visit_order


def table(labels: Sequence[Any], **more: Sequence[Any]) -> pa.Table:
    return pa.table({"prompt": [f"question {i}" for i in range(len(labels))], "label": labels, **more})


def parquet(path: Path, content: pa.Table) -> Path:
    pq.write_table(content, path)
    return path


def stream(path: Path, content: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, content.schema) as writer:
        writer.write_table(content, max_chunksize=2)


def saved_dataset(folder: Path, *shards: pa.Table) -> Path:
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        stream(folder / name, shard)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


def labels(*paths: Path, **keys: Any) -> list[str | None]:
    return [row.label for row in read_prompts(Data(path=paths, **keys))]


def refused(*paths: Path, **keys: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        read_prompts(Data(path=paths, **keys))
    assert "\n" not in caught.value.message
    return caught.value.message


def test_empty_row_groups_and_empty_files_lose_no_row(tmp_path: Path) -> None:
    whole = table([str(3 * i) for i in range(7)])
    with pq.ParquetWriter(tmp_path / "b.parquet", whole.schema) as writer:
        for start, stop in [(0, 3), (3, 3), (3, 6), (6, 7)]:
            writer.write_table(whole.slice(start, stop - start))
    empty = parquet(tmp_path / "a.parquet", whole.slice(0, 0))
    assert labels(empty, tmp_path / "b.parquet") == [str(3 * i) for i in range(7)]
    assert "no rows" in refused(empty)


def test_integers_keep_every_digit_beside_a_missing_one(tmp_path: Path) -> None:
    big = 2**53 + 7
    path = parquet(tmp_path / "d.parquet", table(pa.array([big, None, 8], pa.int64())))
    assert "d.parquet, row 2: label must be a text or a number, found null" in refused(path)
    whole = parquet(tmp_path / "e.parquet", table(pa.array([big, 8], pa.int64())))
    assert labels(whole) == [str(big), "8"]


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pa.array([True]), "found true"),
        (pa.array([["7"]]), 'found ["7"]'),
        (pa.array([float("nan")]), "found NaN"),
        (pa.array([""]), "label is empty"),
        (pa.array(["\x0crac{1}{2}"]), "single backslash"),
        (pa.array([b"7"]), "must be a text or a number"),
    ],
)
def test_a_bad_label_is_refused_with_file_and_row(tmp_path: Path, column: pa.Array, words: str) -> None:
    message = refused(parquet(tmp_path / "d.parquet", table(column)))
    assert "d.parquet, row 1: " in message
    assert words in message


def test_a_wrong_prompt_deep_in_the_file_is_refused_with_its_row(tmp_path: Path) -> None:
    content = pa.table({"prompt": ["fine"] * 5000 + [""], "label": ["1"] * 5001})
    assert "row 5001: prompt must be a non-empty text" in refused(parquet(tmp_path / "d.parquet", content))
    numbers = pa.table({"prompt": [3], "label": ["1"]})
    assert "row 1: prompt must be a non-empty text" in refused(parquet(tmp_path / "n.parquet", numbers))


def test_a_column_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["1"]), pa.array(["2"])], ["prompt", "label", "label"])
    assert "column 'label' occurs twice" in refused(parquet(tmp_path / "d.parquet", twice))


@pytest.mark.parametrize("name", ["d.parquet", "d.arrow"])
def test_a_file_that_is_damaged_or_away_is_named(tmp_path: Path, name: str) -> None:
    assert f"{name}: No such file" in refused(tmp_path / name)
    (tmp_path / name).write_bytes(b"something else")
    assert f"{name}: not a readable" in refused(tmp_path / name)


def test_a_saved_dataset_is_read_shard_by_shard(tmp_path: Path) -> None:
    folder = saved_dataset(tmp_path / "set", table(["0", "1", "2"]), table([], other=[]).select([0, 1]), table(["3"]))
    assert labels(folder) == ["0", "1", "2", "3"]
    (folder / "data-00000-of-00003.arrow").unlink()
    assert "data-00000-of-00003.arrow: No such file" in refused(folder)
    (folder / "state.json").write_text('{"_data_files": []}')
    assert "names no data files" in refused(folder)


def test_splits_are_never_mixed(tmp_path: Path) -> None:
    for split in ("train", "test"):
        saved_dataset(tmp_path / "set" / split, table([split]))
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert "it has 2 splits; set data.split to one of train, test" in refused(tmp_path / "set")
    assert labels(tmp_path / "set", split="test") == ["test"]
    assert "no split 'dev'" in refused(tmp_path / "set", split="dev")

    (tmp_path / "published" / "data").mkdir(parents=True)
    for split in ("train", "test"):
        parquet(tmp_path / "published" / "data" / f"{split}-00000-of-00001.parquet", table([split]))
    assert "it has 2 splits" in refused(tmp_path / "published")
    assert labels(tmp_path / "published", split="train") == ["train"]


def test_a_folder_gives_its_files_in_order_and_formats_may_be_mixed(tmp_path: Path) -> None:
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.jsonl").write_text("{")
    (tmp_path / "notes.md").write_text("no data")
    assert "no .jsonl" in refused(tmp_path)
    parquet(tmp_path / "b.parquet", table(["b"]))
    (tmp_path / "a.jsonl").write_text('{"prompt": "p", "label": "a"}')
    assert labels(tmp_path) == ["a", "b"]


def test_fields_are_mapped(tmp_path: Path) -> None:
    content = table(["1"], text=["hello"], level=[3], extra=["x"])
    path = parquet(tmp_path / "d.parquet", content)
    row = read_prompts(Data(path=(path,), prompt_field="text", label_field="level", metadata_fields=("extra",)))[0]
    assert (row.prompt, row.label, row.metadata_json) == ("hello", "3", '{"extra": "x"}')
    everything = read_prompts(Data(path=(path,), prompt_field="text", label_field="level"))[0]
    assert json.loads(everything.metadata_json) == {"prompt": "question 0", "label": "1", "extra": "x"}
    assert "no field 'rank' of data.metadata_fields" in refused(path, metadata_fields=("rank",))
    assert "row 1: no field 'goal'" in refused(path, label_field="goal")


def test_media_fields_travel_as_references_and_bytes_as_data_uris(tmp_path: Path) -> None:
    content = table(["1"], image=[{"bytes": b"\x89P", "path": None}], clips=[["a.mp4", "https://x/b.mp4"]])
    path = parquet(tmp_path / "d.parquet", content)
    row = read_prompts(Data(path=(path,), media_fields=("image", "clips"), metadata_fields=()))[0]
    encoded = "data:application/octet-stream;base64," + base64.b64encode(b"\x89P").decode()
    assert json.loads(row.metadata_json) == {"image": encoded, "clips": ["a.mp4", "https://x/b.mp4"]}
    assert "row 1: metadata cannot be carried: it holds bytes, which are for data.media_fields" in refused(path)
    assert "row 1: no field 'picture' of data.media_fields" in refused(path, media_fields=("image", "picture"))
    mixed = parquet(tmp_path / "e.parquet", table(["1", "2"], image=[None, 5]))
    assert "row 2: image must name media by path" in refused(mixed, media_fields=("image",))


def test_dates_and_decimals_travel_as_text(tmp_path: Path) -> None:
    import datetime
    from decimal import Decimal

    content = table([Decimal("1.50")], day=[datetime.date(2026, 3, 1)])
    row = read_prompts(Data(path=(parquet(tmp_path / "d.parquet", content),)))[0]
    assert (row.label, json.loads(row.metadata_json)) == ("1.50", {"day": "2026-03-01"})


def test_chat_messages_lose_the_nulls_of_a_columnar_file(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "2+5?", "name": None}, {"role": "assistant", "content": "2+5 =", "name": "b"}]
    path = parquet(tmp_path / "d.parquet", pa.table({"prompt": [chat], "label": ["7"]}))
    expected = [{"role": "user", "content": "2+5?"}, {"role": "assistant", "content": "2+5 =", "name": "b"}]
    assert read_prompts(Data(path=(path,)))[0].prompt == Chat(expected)
    with_system = read_prompts(Data(path=(path,), system_prompt="Be brief."))[0].prompt
    assert with_system == Chat([{"role": "system", "content": "Be brief."}, *expected])


def test_a_text_becomes_a_chat_where_the_recipe_says_so(tmp_path: Path) -> None:
    path = parquet(tmp_path / "d.parquet", table(["7"]))
    row = read_prompts(Data(path=(path,), as_chat=True, system_prompt="Be brief."))[0]
    assert row.prompt == Chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "question 0"}])


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "prompt is an empty list of messages"),
        ([{"content": "x"}], "prompt[0] has no role"),
        ([{"role": "user", "content": 5}], "prompt[0]: content must be a text or a list of parts, found int"),
        (["x"], "prompt[0] must be a message, found str"),
        ({"role": "user"}, "must be a non-empty text or a list of chat messages"),
    ],
)
def test_a_bad_chat_is_refused_with_its_line(tmp_path: Path, prompt: object, words: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"prompt": prompt, "label": "1"}))
    message = refused(path)
    assert "line 1: " in message
    assert words in message


def test_after_a_part_of_a_pass_the_rest_is_visited_once(tmp_path: Path) -> None:
    path = parquet(tmp_path / "d.parquet", table([str(i) for i in range(9)]))
    rows = read_prompts(Data(path=(path,)))
    order = visit_order(len(rows), 5, 0, True)
    again = visit_order(len(read_prompts(Data(path=(path,)))), 5, 0, True)
    assert sorted(order[:6] + again[6:]) == list(range(9))


def test_what_is_neither_a_file_nor_a_folder_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A pipe or a device has no end: relaxd read on in the background and took more and more memory."""
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    with pytest.raises(InvalidInput, match=r"data .*pipe\.jsonl: it is neither a file nor a folder"):
        read_prompts(Data(path=(pipe,)))


def test_a_folder_that_changes_while_it_is_searched_is_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(folder: Path, pattern: str) -> Iterator[Path]:
        yield folder / "a.jsonl"
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(folder / "b"))

    monkeypatch.setattr(Path, "rglob", gone)
    with pytest.raises(InvalidInput, match=r"data .*: .*/b: No such file or directory"):
        read_prompts(Data(path=(tmp_path,)))
