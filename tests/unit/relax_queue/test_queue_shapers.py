"""Micro-batches: every row once, samples and groups whole, budgets kept, ranks balanced, order of no matter."""

import hypothesis.strategies as st
from hypothesis import given, settings

from relax_queue.admission import deadline, first_late, fits, on_line
from relax_queue.shapers import Ranks, Unit, token_budget, whole_groups

LENGTHS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=5)


def units(lengths: list[list[int]]) -> list[list[Unit]]:
    return [[Unit(((f"g{g}", s, 0),), n) for s, n in enumerate(group)] for g, group in enumerate(lengths)]


def check_all_rows_once(ranks: Ranks, groups: list[list[Unit]]) -> None:
    planned = sorted(row for rank in ranks for batch in rank for row in batch.rows)
    assert planned == sorted(row for group in groups for unit in group for row in unit.rows)


@settings(max_examples=80, deadline=None)
@given(lengths=LENGTHS, n_ranks=st.integers(1, 4), budget=st.integers(10, 100))
def test_token_budget_fills_micro_batches_and_balances_ranks(
    lengths: list[list[int]], n_ranks: int, budget: int
) -> None:
    groups = units(lengths)
    ranks = token_budget(groups, n_ranks, budget)
    check_all_rows_once(ranks, groups)
    for rank in ranks:
        for batch in rank:
            assert batch.n_tokens <= budget or len(batch.rows) == 1
    loads = [sum(b.n_tokens for b in rank) for rank in ranks]
    assert max(loads) - min(loads) <= max(n for group in lengths for n in group)
    assert token_budget(groups[::-1], n_ranks, budget) == ranks


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, n_ranks=st.integers(1, 4))
def test_whole_groups_are_one_micro_batch_each(lengths: list[list[int]], n_ranks: int) -> None:
    groups = units(lengths)
    ranks = whole_groups(groups, n_ranks)
    check_all_rows_once(ranks, groups)
    assert all(len({row[0] for row in batch.rows}) == 1 for rank in ranks for batch in rank)


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
