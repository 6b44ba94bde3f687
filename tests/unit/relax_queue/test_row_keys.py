"""Packed columns of keys and facts are equal to lists of keys and facts."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import InvalidInput
from relax_common.versions import PolicyVersion
from relax_queue.rows import columns as columns_module
from relax_queue.rows.column_block import Column, encode, ragged, read_table
from relax_queue.rows.columns import row_facts, sample_facts
from relax_queue.rows.facts import NO_ROWS, NO_SAMPLES, RowFacts, facts_of_rows, facts_of_samples
from relax_queue.rows.row_keys import EMPTY, block_from, block_to, join_keys, keys_of, keys_of_columns, keys_of_samples

KEYS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.integers(0, 1)), max_size=12)
OF_A_GROUP = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), unique=True, max_size=8)
TOKENS = st.dictionaries(st.sampled_from([0, 1, 2, 1 << 32]), st.integers(1, 3), max_size=3)


@settings(max_examples=60, deadline=None)
@given(KEYS, KEYS)
def test_keys_are_the_same_as_runs(one: list[tuple[str, int, int]], other: list[tuple[str, int, int]]) -> None:
    keys = keys_of(one)
    assert list(keys) == one
    assert (len(keys), bool(keys), keys == tuple(one)) == (len(one), bool(one), True)
    assert keys.groups == tuple(dict.fromkeys(key[0] for key in one))
    assert list(keys.samples()) == list(dict.fromkeys((group, sample, 0) for group, sample, _ in one))
    assert [(g, s + i, t) for g, runs in keys.by_group() for s, t, n in runs for i in range(n)] == one
    assert join_keys([keys, EMPTY, keys_of(other)]) == keys + keys_of(other) == keys_of(one + other)
    assert block_from(block_to(one)) == keys
    assert block_from(pb.RowBlock.FromString(block_to(keys).SerializeToString())) == keys


@settings(max_examples=40, deadline=None)
@given(OF_A_GROUP, OF_A_GROUP)
def test_keys_of_one_group_have_columns(own: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    keys = keys_of(("g", *key) for key in own)
    samples, segments = keys.columns()
    assert list(zip(samples.tolist(), segments.tolist(), strict=True)) == list(keys.segments()) == own
    assert keys_of_columns("g", samples, segments) == keys
    assert keys.ascending == (own == sorted(own))
    asked = [run for _, runs in keys_of(("g", *key) for key in other).by_group() for run in runs]
    assert keys.first_missing(asked) == next((key for key in other if key not in own), None)


def test_many_samples_of_a_group_are_sixteen_bytes() -> None:
    keys = keys_of_samples("g", range(1024))
    assert keys == keys_of([("g", s, 0) for s in range(1024)])
    assert keys == keys_of_samples("g", list(range(1024)))
    assert (len(keys), len(keys.spans)) == (1024, 16)


@pytest.mark.parametrize(
    ("groups", "runs"),
    [
        (["g"], [0, 0, 0]),
        (["g"], [1, 0, 0, 1]),
        (["g"], [-1, 0, 0, 1]),
        (["g", "h"], [1, 0, 0, 1, 0, 0, 0, 1]),
        (["g"], [0, -1, 0, 1]),
        (["g"], [0, 0, -1, 1]),
        (["g"], [0, 0, 0, 0]),
        (["g"], [0, 2**31 - 1, 0, 2]),
        (["g"], [0, 0, 0, 2**31 - 1]),
    ],
)
def test_a_block_that_is_none_is_refused(groups: list[str], runs: list[int]) -> None:
    with pytest.raises(InvalidInput, match="a block of row keys"):
        block_from(pb.RowBlock(groups=groups, spans=np.array(runs, "<i4").tobytes()))


def facts_by_key(facts: RowFacts) -> dict[tuple[int, int], tuple[int, dict[int, int]]]:
    tokens: list[dict[int, int]] = [{} for _ in range(len(facts))]
    columns = (np.frombuffer(c, d).tolist() for c, d in
               ((facts.version_rows, "<i4"), (facts.versions, "<i8"), (facts.version_tokens, "<i4")))  # fmt: skip
    for row, version, n in zip(*columns, strict=True):
        tokens[row][version] = n
    assert facts.loss_tokens() == [sum(counts.values()) for counts in tokens]
    assert facts.distinct_versions() == {version for counts in tokens for version in counts}
    return dict(zip(facts.keys.segments(), zip(facts.tokens(), tokens, strict=True), strict=True))


@settings(max_examples=40, deadline=None)
@given(OF_A_GROUP, OF_A_GROUP, st.data())
def test_facts_are_merged_cut_and_masked_row_by_row(
    first: list[tuple[int, int]], second: list[tuple[int, int]], data: st.DataObject
) -> None:
    books: dict[tuple[int, int], tuple[int, dict[int, int]]] = {}
    facts = NO_ROWS
    for own in (first, [key for key in second if key not in first]):
        versions = [data.draw(TOKENS) for _ in own]
        books |= {key: (10 + i, counts) for i, (key, counts) in enumerate(zip(own, versions, strict=True))}
        lengths = [10 + i for i in range(len(own))]
        facts = facts.merged(facts_of_rows(keys_of(("g", *key) for key in own), lengths, versions))
    assert facts_by_key(facts) == books
    assert list(facts.keys.segments()) == sorted(books)
    wanted = {0, 2, 3}
    assert facts_by_key(facts.of_samples(wanted)) == {k: v for k, v in books.items() if k[0] in wanted}
    assert facts_by_key(facts.without(wanted)) == {k: v for k, v in books.items() if k[0] not in wanted}
    masked = [sum(n for v, n in books[key][1].items() if PolicyVersion.unpack(v).number >= 1) for key in sorted(books)]
    assert facts.loss_tokens(1) == masked


def test_facts_of_samples_know_the_newest_word_and_the_mean_of_valid_rewards() -> None:
    old = NO_SAMPLES.merged(facts_of_samples([3, 1], [True, False], [0.5, float("nan")]))
    assert list(old) == [1, 3]
    both = old.merged(facts_of_samples([1, 2], [True, True], [1.5, 1.0]))
    assert (list(both), both.n_valid, both.reward_mean()) == ([1, 2, 3], 3, 1.0)
    assert old.valid_samples() == [3]
    assert facts_of_samples([0], [True]).reward_mean() is None


@pytest.mark.parametrize("few_tokens", [0, columns_module.FEW_TOKENS])
@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=1, max_size=6), min_size=1, max_size=4))
def test_facts_of_a_put_count_trained_tokens_by_version(few_tokens: int, rows: list[list[tuple[bool, int]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns_module, "FEW_TOKENS", few_tokens)
        facts_are_right(rows)


def facts_are_right(rows: list[list[tuple[bool, int]]]) -> None:
    columns = {
        "tokens": ragged("row", [np.zeros(len(row), np.int32) for row in rows]),
        "loss_mask": ragged("row", [np.array([trained for trained, _ in row], np.uint8) for row in rows]),
        "versions": ragged("row", [np.array([v if t else -1 for t, v in row], np.int64) for row in rows]),
        "reward": Column("sample", np.arange(len(rows), dtype=np.float32)),
        "reward_status": Column("sample", np.array([i % 2 for i in range(len(rows))], np.uint8)),
    }
    keys = keys_of_samples("g", range(len(rows)))
    expected = [{v: sum((t, w) == (True, v) for t, w in row) for v in {w for t, w in row if t}} for row in rows]
    entries = read_table(encode(columns)).entries
    assert row_facts(entries, keys) == facts_of_rows(keys, [len(row) for row in rows], expected)
    valid = [i % 2 == 0 for i in range(len(rows))]
    rewards = [float(i) if ok else float("nan") for i, ok in enumerate(valid)]
    assert sample_facts(entries, keys) == facts_of_samples(range(len(rows)), valid, rewards)
    columns["versions"] = ragged("row", [np.full(len(row), -1, np.int64) for row in rows])
    entries = read_table(encode(columns)).entries
    if any(trained for row in rows for trained, _ in row):
        at = next(i for i, row in enumerate(rows) if any(trained for trained, _ in row))
        with pytest.raises(InvalidInput, match=rf"row g/{at}/0: a token with loss mask 1 has no policy"):
            row_facts(entries, keys)
