"""How the rows of a chunk become micro-batches by data-parallel rank: pure functions of ids and lengths (I7)."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from relax_queue.events import Microbatch, RowKey

Ranks = tuple[tuple[Microbatch, ...], ...]


class Unit(NamedTuple):
    """Rows that stay together, and their tokens."""

    rows: tuple[RowKey, ...]
    n_tokens: int


def whole_groups(groups: Sequence[Sequence[Unit]], n_ranks: int) -> Ranks:
    """Each group is one micro-batch; groups go to the rank with the fewest tokens, largest first."""
    batches = [Microbatch(tuple(r for u in g for r in u.rows), sum(u.n_tokens for u in g)) for g in groups if g]
    ranks: list[list[Microbatch]] = [[] for _ in range(n_ranks)]
    for batch in sorted(batches, key=lambda b: (-b.n_tokens, b.rows)):
        _least_loaded(ranks).append(batch)
    return tuple(tuple(r) for r in ranks)


def _least_loaded(ranks: list[list[Microbatch]]) -> list[Microbatch]:
    return min(ranks, key=lambda r: sum(b.n_tokens for b in r))


def token_budget(groups: Sequence[Sequence[Unit]], n_ranks: int, tokens_per_microbatch: int) -> Ranks:
    """Samples go to the rank with the fewest tokens, largest first; each rank packs them first-fit into micro-batches.

    A sample longer than the budget is a micro-batch of its own.
    """
    units = sorted((u for g in groups for u in g), key=lambda u: (-u.n_tokens, u.rows))
    loads = [0] * n_ranks
    packed: list[list[list[Unit]]] = [[] for _ in range(n_ranks)]
    tokens: list[list[int]] = [[] for _ in range(n_ranks)]
    for unit in units:
        rank = loads.index(min(loads))
        loads[rank] += unit.n_tokens
        room = tokens_per_microbatch - unit.n_tokens
        at = next((i for i, n in enumerate(tokens[rank]) if n <= room), len(tokens[rank]))
        if at == len(tokens[rank]):
            packed[rank].append([])
            tokens[rank].append(0)
        packed[rank][at].append(unit)
        tokens[rank][at] += unit.n_tokens
    return tuple(
        tuple(Microbatch(tuple(r for u in batch for r in u.rows), n) for batch, n in zip(*rank, strict=True))
        for rank in zip(packed, tokens, strict=True)
    )


def sequential(groups: Sequence[Sequence[Unit]], n_ranks: int, tokens_per_microbatch: int) -> Ranks:
    """Samples in the order given; a micro-batch ends where the next sample does not fit; ranks take turns."""
    batches: list[list[Unit]] = []
    for unit in (u for g in groups for u in g):
        if not batches or _tokens(batches[-1]) + unit.n_tokens > tokens_per_microbatch:
            batches.append([])
        batches[-1].append(unit)
    return tuple(tuple(_microbatch(b) for b in batches[rank::n_ranks]) for rank in range(n_ranks))


def length_balanced(groups: Sequence[Sequence[Unit]], n_ranks: int, tokens_per_microbatch: int) -> Ranks:
    """Samples are spread over ranks, then over each rank's micro-batches, so that sums of tokens are nearly equal.

    Every rank gets as many micro-batches, the fewest with which none exceeds the budget (but a longer sample, alone),
    as far as it has samples for them.
    """
    units = sorted((u for g in groups for u in g), key=lambda u: (-u.n_tokens, u.rows))
    ranks = karmarkar_karp(units, n_ranks)
    most = max((len(rank) for rank in ranks), default=0)
    parts: list[list[list[Unit]]] = []
    for n_batches in range(1, most + 1):
        parts = [karmarkar_karp(rank, min(n_batches, len(rank))) for rank in ranks]
        if all(_tokens(b) <= tokens_per_microbatch or len(b) == 1 for rank in parts for b in rank):
            break
    return tuple(tuple(_microbatch(b) for b in rank if b) for rank in parts) or tuple(() for _ in range(n_ranks))


def karmarkar_karp(units: Sequence[Unit], n_parts: int) -> list[list[Unit]]:
    """Parts with nearly equal sums of tokens, by largest differencing (Karmarkar and Karp, 1982). `units` are sorted.

    Each unit begins as a partition of its own; the two partitions with the largest spread are joined, the heaviest
    part of one with the lightest of the other, until one is left.
    """
    if n_parts < 1:
        return []
    heap: list[tuple[int, int, list[tuple[int, list[Unit]]]]] = []
    for number, unit in enumerate(units):
        parts = [(unit.n_tokens, [unit])] + [(0, list[Unit]()) for _ in range(n_parts - 1)]
        heap.append((-unit.n_tokens if n_parts > 1 else 0, number, parts))
    heapq.heapify(heap)
    number = len(units)
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [(a + b, left + right) for (a, left), (b, right) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    return [part for _, part in heap[0][2]] if heap else [[] for _ in range(n_parts)]


def _tokens(units: Sequence[Unit]) -> int:
    return sum(u.n_tokens for u in units)


def _microbatch(units: Sequence[Unit]) -> Microbatch:
    return Microbatch(tuple(r for u in units for r in u.rows), _tokens(units))
