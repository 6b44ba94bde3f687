"""How the rows of a chunk become micro-batches by data-parallel rank: pure functions of ids and lengths (I7).

Rows that stay together (a sample or a group) are one number here. Numbers follow ids, so the order of arrival matters
only to `sequential`.
"""

import heapq
from collections.abc import Iterable, Sequence
from itertools import groupby

from relax_common.rows import RowKey
from relax_queue.rows import row_keys
from relax_queue.rows.facts import RowFacts
from relax_queue.rows.spec import Packer
from relax_queue.rules.events import Microbatch

Ranks = tuple[tuple[Microbatch, ...], ...]
Batch = list[int]
"""Numbers of what is in a micro-batch"""


def pack(packer: Packer, groups: Sequence[RowFacts], n_ranks: int, tokens_per_microbatch: int) -> Ranks:
    """Micro-batches of the rows of some groups, each in order of sample and segment."""
    groups = [group for group in groups if len(group)]
    if packer != "sequential":
        groups = sorted(groups, key=lambda group: group.keys.groups)
    samples, sizes = _whole(groups) if packer == "whole_groups" else _samples(groups)
    ranks = _PACKERS[packer](sizes, n_ranks, tokens_per_microbatch)
    return tuple([tuple([_microbatch(samples, sizes, batch) for batch in rank]) for rank in ranks])


def _microbatch(samples: Sequence[Sequence[RowKey]], sizes: Sequence[int], batch: Batch) -> Microbatch:
    keys = row_keys.keys_of([key for number in batch for key in samples[number]])
    return Microbatch(keys, sum([sizes[number] for number in batch]))


def _whole(groups: Iterable[RowFacts]) -> tuple[list[list[RowKey]], list[int]]:
    """Rows and tokens of each group: a prefix its rows share is computed once if they are in one micro-batch."""
    return [list(group.keys) for group in groups], [sum(group.tokens()) for group in groups]


def _samples(groups: Iterable[RowFacts]) -> tuple[list[list[RowKey]], list[int]]:
    """Rows and tokens of each sample; most have one row."""
    rows: list[list[RowKey]] = []
    sizes: list[int] = []
    for group in groups:
        tokens = group.tokens()
        if group.keys.is_one_span:
            rows += [[key] for key in group.keys]
            sizes += tokens
            continue
        for _, same in groupby(zip(group.keys, tokens, strict=True), lambda row: row[0][1]):
            of_sample = list(same)
            rows.append([key for key, _ in of_sample])
            sizes.append(sum([n for _, n in of_sample]))
    return rows, sizes


def _largest_first(sizes: Sequence[int]) -> Batch:
    return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)  # those of equal size stay in order


def token_budget(sizes: Sequence[int], n_ranks: int, tokens_per_microbatch: int) -> list[list[Batch]]:
    """Samples go to the rank with the fewest tokens, largest first; each rank packs them first-fit into micro-batches.

    A sample longer than the budget is a micro-batch of its own.
    """
    loads = [0] * n_ranks
    packed: list[list[Batch]] = [[] for _ in range(n_ranks)]
    tokens: list[list[int]] = [[] for _ in range(n_ranks)]
    for number in _largest_first(sizes):
        rank, size = loads.index(min(loads)), sizes[number]
        loads[rank] += size
        filled = tokens[rank]
        for at, n in enumerate(filled):
            if n + size <= tokens_per_microbatch:
                packed[rank][at].append(number)
                filled[at] += size
                break
        else:
            packed[rank].append([number])
            filled.append(size)
    return packed


def sequential(sizes: Sequence[int], n_ranks: int, tokens_per_microbatch: int) -> list[list[Batch]]:
    """Samples in the order given; a micro-batch ends where the next sample does not fit; ranks take turns."""
    batches: list[Batch] = []
    filled = 0
    for number, size in enumerate(sizes):
        if not batches or filled + size > tokens_per_microbatch:
            batches.append([])
            filled = 0
        batches[-1].append(number)
        filled += size
    return [batches[rank::n_ranks] for rank in range(n_ranks)]


def length_balanced(sizes: Sequence[int], n_ranks: int, tokens_per_microbatch: int) -> list[list[Batch]]:
    """Samples are spread over ranks, then over each rank's micro-batches, so that sums of tokens are nearly equal.

    Every rank gets the same number of micro-batches if it has enough samples: the smallest number with which none
    exceeds the budget (except that of a single longer sample).
    """
    ranks = karmarkar_karp(sizes, _largest_first(sizes), n_ranks)
    most = max((len(rank) for rank in ranks), default=0)
    # Fewer are not enough: a longer sample fills one alone.
    clipped = [sum([min(sizes[i], tokens_per_microbatch) for i in rank]) for rank in ranks]
    fewest = max((-(-n // tokens_per_microbatch) for n in clipped), default=1)
    parts: list[list[Batch]] = [[] for _ in ranks]
    for n_batches in range(max(fewest, 1), most + 1):
        parts = [karmarkar_karp(sizes, rank, min(n_batches, len(rank))) for rank in ranks]
        if all(len(b) == 1 or sum([sizes[i] for i in b]) <= tokens_per_microbatch for rank in parts for b in rank):
            break
    return [[batch for batch in rank if batch] for rank in parts]


def karmarkar_karp(sizes: Sequence[int], numbers: Sequence[int], n_parts: int) -> list[Batch]:
    """Parts with nearly equal sums of tokens, by largest differencing (Karmarkar and Karp, 1982).

    Each number begins as a partition of its own; the two partitions with the largest spread are joined, the heaviest
    part of one with the lightest of the other, until one is left.
    """
    if n_parts < 1:
        return []
    heap: list[tuple[int, int, list[tuple[int, Batch]]]] = []
    for order, number in enumerate(numbers):
        size = sizes[number]
        parts = [(size, [number])] + [(0, Batch()) for _ in range(n_parts - 1)]
        heap.append((-size if n_parts > 1 else 0, order, parts))
    heapq.heapify(heap)
    order = len(numbers)
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [(a + b, left + right) for (a, left), (b, right) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], order, joined))
        order += 1
    return [part for _, part in heap[0][2]] if heap else [[] for _ in range(n_parts)]


_PACKERS = {
    "token_budget": token_budget,
    "whole_groups": token_budget,
    "sequential": sequential,
    "length_balanced": length_balanced,
}
