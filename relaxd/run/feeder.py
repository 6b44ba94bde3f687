"""Offers prompt groups to the queue, a bounded window ahead. The queue, not the feeder, remembers its position."""

from __future__ import annotations

from collections.abc import Sequence

from relax.queue.v1 import queue_pb2
from relax_common.recipe import Recipe
from relax_queue.client import AioQueueClient
from relaxd.data import PromptRow, group_id, parse_group_id, visit_order

OFFERS_PER_CALL = 256


class Feeder:
    """One run's feeder; `top_up` is called whenever the queue may have room."""

    def __init__(self, recipe: Recipe, rows: Sequence[PromptRow], term: int) -> None:
        self._recipe = recipe
        self._rows = rows
        self._term = term
        self._window_groups = recipe.prompt_window_steps * recipe.prompts_per_step
        self._visited: tuple[int, list[int]] = (-1, [])

    def runs_low(self, pending: int) -> bool:
        """Whether half of the window is used up, so that it is time to offer more."""
        return 2 * pending < self._window_groups

    async def top_up(self, queue: AioQueueClient, status: queue_pb2.RunStatus) -> bool:
        """Offer what the window lacks; True once the data has been offered to its end."""
        missing = self._window_groups - status.counts.pending
        groups = self._after(status.last_offered, max(0, min(missing, OFFERS_PER_CALL)))
        if groups:
            await queue.offer_groups(groups, self._term)
        return missing > 0 and not groups

    async def offer_again(self, queue: AioQueueClient, groups: Sequence[str], after_dcs_revision: int) -> None:
        """Offer groups of a dead lineage again, after the record that ended it."""
        for start in range(0, len(groups), OFFERS_PER_CALL):
            offers = [self._group(*parse_group_id(g, len(self._rows))) for g in groups[start : start + OFFERS_PER_CALL]]
            await queue.offer_groups(offers, self._term, after_dcs_revision)

    def _after(self, last_offered: str, count: int) -> list[queue_pb2.PromptGroup]:
        pass_, index = 0, 0
        if last_offered:
            pass_, position = parse_group_id(last_offered, len(self._rows))
            index = self._order(pass_).index(position) + 1
        groups: list[queue_pb2.PromptGroup] = []
        while len(groups) < count:
            if index == len(self._rows):
                pass_, index = pass_ + 1, 0
            if self._recipe.data.passes and pass_ >= self._recipe.data.passes:
                break
            groups.append(self._group(pass_, self._order(pass_)[index]))
            index += 1
        return groups

    def _order(self, pass_: int) -> list[int]:
        if self._visited[0] != pass_:
            self._visited = (pass_, visit_order(len(self._rows), self._recipe.seed, pass_, self._recipe.data.shuffle))
        return self._visited[1]

    def _group(self, pass_: int, position: int) -> queue_pb2.PromptGroup:
        row = self._rows[position]
        group = queue_pb2.PromptGroup(
            group=group_id(pass_, position),
            position=position,
            prompt_json=row.prompt_json,
            metadata_json=row.metadata_json,
        )
        setattr(group, "pass", pass_)  # a keyword in Python
        if row.label is not None:
            group.label = row.label
        return group
