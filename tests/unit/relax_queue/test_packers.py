"""Micro-batches: every row once, samples and groups whole, budgets kept, ranks balanced, in any order."""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from relax_queue.rows.facts import RowFacts, facts_of_rows
from relax_queue.rows.row_keys import keys_of
from relax_queue.rows.spec import Packer
from relax_queue.rules.admission import deadline, first_late, fits, on_line
from relax_queue.rules.packers import Ranks, karmarkar_karp, pack

LENGTHS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=5)


def facts(lengths: list[list[int]], segments: int = 1) -> list[RowFacts]:
    """Groups whose samples have these lengths, in this many segments each."""
    return [
        facts_of_rows(
            keys_of((f"g{g}", s, t) for s in range(len(group)) for t in range(segments)),
            [n for n in group for _ in range(segments)],
            [{}] * len(group) * segments,
        )
        for g, group in enumerate(lengths)
    ]


def check_all_rows_once(ranks: Ranks, groups: list[RowFacts]) -> None:
    planned = sorted(row for rank in ranks for batch in rank for row in batch.rows)
    assert planned == sorted(row for group in groups for row in group.keys)
    tokens = {key: n for group in groups for key, n in zip(group.keys, group.tokens(), strict=True)}
    assert all(batch.n_tokens == sum(tokens[row] for row in batch.rows) for rank in ranks for batch in rank)


@settings(max_examples=80, deadline=None)
@given(lengths=LENGTHS, n_ranks=st.integers(1, 4), budget=st.integers(10, 100))
def test_token_budget_fills_micro_batches_and_balances_ranks(
    lengths: list[list[int]], n_ranks: int, budget: int
) -> None:
    groups = facts(lengths)
    ranks = pack("token_budget", groups, n_ranks, budget)
    check_all_rows_once(ranks, groups)
    for rank in ranks:
        for batch in rank:
            assert batch.n_tokens <= budget or len(batch.rows) == 1
    loads = [sum(b.n_tokens for b in rank) for rank in ranks]
    assert max(loads) - min(loads) <= max(n for group in lengths for n in group)
    assert pack("token_budget", groups[::-1], n_ranks, budget) == ranks


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, n_ranks=st.integers(1, 4), budget=st.integers(10, 100))
def test_whole_groups_fill_micro_batches_and_are_never_split(
    lengths: list[list[int]], n_ranks: int, budget: int
) -> None:
    groups = facts(lengths)
    ranks = pack("whole_groups", groups, n_ranks, budget)
    check_all_rows_once(ranks, groups)
    members = [{row[0] for row in batch.rows} for rank in ranks for batch in rank]
    assert sum(map(len, members)) == len(lengths), "no group is in two"
    for batch, within in zip((b for rank in ranks for b in rank), members, strict=True):
        assert batch.n_tokens <= budget or len(within) == 1
    for rank in ranks:
        for one, other in itertools.combinations(rank, 2):
            assert one.n_tokens + other.n_tokens > budget, "the two would have fitted into one"


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, n_ranks=st.integers(1, 3), budget=st.integers(10, 100))
def test_sequential_keeps_the_order_and_fills_micro_batches_in_turn(
    lengths: list[list[int]], n_ranks: int, budget: int
) -> None:
    groups = facts(lengths)
    ranks = pack("sequential", groups, n_ranks, budget)
    check_all_rows_once(ranks, groups)
    batches = [ranks[i % n_ranks][i // n_ranks] for i in range(sum(map(len, ranks)))]
    assert [row for b in batches for row in b.rows] == [row for g in groups for row in g.keys]
    for batch, after in itertools.pairwise(batches):
        group, sample, _ = after.rows[0]
        assert batch.n_tokens + lengths[int(group[1:])][sample] > budget, "the next sample would have fitted"
        assert batch.n_tokens <= budget or len(batch.rows) == 1


@settings(max_examples=80, deadline=None)
@given(lengths=LENGTHS, n_ranks=st.integers(1, 4), budget=st.integers(10, 100))
def test_length_balanced_gives_ranks_as_many_micro_batches_of_nearly_equal_sums(
    lengths: list[list[int]], n_ranks: int, budget: int
) -> None:
    groups = facts(lengths)
    ranks = pack("length_balanced", groups, n_ranks, budget)
    check_all_rows_once(ranks, groups)
    most = max(len(rank) for rank in ranks)
    for rank in ranks:
        assert len(rank) == most or len(rank) == sum(len(b.rows) for b in rank)
        for batch in rank:
            assert batch.n_tokens <= budget or len(batch.rows) == 1
    loads = [sum(b.n_tokens for b in rank) for rank in ranks]
    longest = max(n for group in lengths for n in group)
    assert max(loads) - min(loads) <= longest
    assert pack("length_balanced", groups[::-1], n_ranks, budget) == ranks


@pytest.mark.parametrize("packer", ["sequential", "token_budget", "length_balanced"])
def test_a_micro_batch_of_many_short_rows_is_whole(packer: Packer) -> None:
    groups = facts([[1] * 16] * 16)
    for n_ranks in (1, 2):
        ranks = pack(packer, groups, n_ranks, 1000)
        assert [len(rank) for rank in ranks] == [1] * n_ranks or packer == "sequential"
        check_all_rows_once(ranks, groups)


@pytest.mark.parametrize("packer", ["sequential", "token_budget", "length_balanced", "whole_groups"])
def test_the_segments_of_a_sample_stay_together(packer: Packer) -> None:
    groups = facts([[3, 5, 2], [4, 4]], segments=3)
    ranks = pack(packer, groups, 2, 12)
    check_all_rows_once(ranks, groups)
    for batch in (batch for rank in ranks for batch in rank):
        rows = list(batch.rows)
        assert rows == [(g, s, t) for g, s in dict.fromkeys((g, s) for g, s, _ in rows) for t in range(3)]


def test_karmarkar_karp_is_better_balanced_than_the_greedy_spread() -> None:
    several = (8, 7, 6, 5, 4)
    loads = sorted(sum(several[i] for i in part) for part in karmarkar_karp(several, range(5), 2))
    assert loads == [14, 16], "the method's own example"
    lengths = [[91, 83, 77, 64, 59, 58, 45, 44, 41, 40, 39, 37, 28, 20, 11, 9]]

    def spread(ranks: Ranks) -> int:
        sums = [sum(b.n_tokens for b in rank) for rank in ranks]
        return max(sums) - min(sums)

    balanced, greedy = (pack(packer, facts(lengths), 4, 1000) for packer in ("length_balanced", "token_budget"))
    assert spread(balanced) < spread(greedy)


@settings(max_examples=100, deadline=None)
@given(deadlines=st.lists(st.integers(0, 9), max_size=12), head=st.integers(0, 5), size=st.integers(1, 4))
def test_I3_fits_and_the_first_late_group_agree(deadlines: list[int], head: int, size: int) -> None:
    late = first_late(sorted(deadlines), head, size)
    assert fits(deadlines, head, size) == (late is None)
    if late is not None:
        assert fits(sorted(deadlines)[:late], head, size)
    if deadlines and fits(deadlines, head, size):
        assert fits(deadlines[1:], head, size), "fewer groups never fit worse"
        assert fits([d + 1 for d in deadlines], head, size)


def test_I2_versions_on_the_line_and_deadlines() -> None:
    assert on_line([0, 0, 1], 1, 2)
    assert not on_line([0, 0, 1], 0, 2)
    assert not on_line([0, 0, 1], 1, 3)
    assert deadline(5, None, 1) == 6
    assert deadline(5, 3, 1) == 4
