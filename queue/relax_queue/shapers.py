"""How the rows of a chunk become micro-batches by data-parallel rank: pure functions of ids and lengths (I7)."""

from collections.abc import Sequence
from dataclasses import dataclass

from relax_queue.events import Microbatch, RowKey

Ranks = tuple[tuple[Microbatch, ...], ...]


@dataclass(frozen=True, slots=True)
class Unit:
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
