"""Groups whose end no replay can change any more, as columns of some sixty bytes per group: a run may have millions.

The newest groups are objects; each thousand of them becomes a block, and blocks of similar size are merged, so that
there are few to search. Only a rollback past F, or the end of the run, takes a group out of its block again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from relax_queue.rules.group import Group, Status

BLOCK_GROUPS = 1024
"""Number of groups that are kept as objects before they become a block."""
_STATUSES = tuple(Status)


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A finished group, with what an offer, a rollback or a person may still need of it."""

    id: str
    order: int
    status: Status
    step: int
    attempts: int
    reason: str
    prompt_digest: int


class _Block:
    """Groups as columns; `present` is false for those that were taken out."""

    def __init__(self, groups: Sequence[FinishedGroup], reasons: dict[str, int]) -> None:
        names = [group.id.encode() for group in groups]
        hashes = np.array([xxhash.xxh3_64_intdigest(name) for name in names], np.uint64)
        self._by_hash = np.argsort(hashes, kind="stable").astype(np.int32)
        self._hashes = hashes[self._by_hash]
        self._names = b"".join(names)
        self._ends = np.cumsum([len(name) for name in names], dtype=np.int64)
        self._orders = np.array([group.order for group in groups], np.int64)
        self.steps = np.array([group.step for group in groups], np.int64)
        self._attempts = np.array([group.attempts for group in groups], np.int32)
        self.statuses = np.array([_STATUSES.index(group.status) for group in groups], np.uint8)
        self._reasons = np.array([reasons.setdefault(group.reason, len(reasons)) for group in groups], np.uint16)
        self._digests = np.array([group.prompt_digest for group in groups], np.uint64)
        self.present: npt.NDArray[np.bool_] = np.ones(len(groups), np.bool_)

    def __len__(self) -> int:
        return len(self.present)

    def find(self, name: str) -> int | None:
        """Where a group is."""
        content = name.encode()
        wanted = np.uint64(xxhash.xxh3_64_intdigest(content))
        at = int(np.searchsorted(self._hashes, wanted))
        while at < len(self._hashes) and self._hashes[at] == wanted:
            place = int(self._by_hash[at])
            if self.present[place] and self._name(place) == content:
                return place
            at += 1
        return None

    def _name(self, place: int) -> bytes:
        start = int(self._ends[place - 1]) if place else 0
        return self._names[start : int(self._ends[place])]

    def group(self, place: int, reasons: Sequence[str]) -> FinishedGroup:
        return FinishedGroup(
            self._name(place).decode(),
            int(self._orders[place]),
            _STATUSES[self.statuses[place]],
            int(self.steps[place]),
            int(self._attempts[place]),
            reasons[self._reasons[place]],
            int(self._digests[place]),
        )

    def copy(self) -> _Block:
        """The columns are shared, since they never change."""
        other = object.__new__(_Block)
        other.__dict__.update(self.__dict__)
        other.present = self.present.copy()
        return other


class Finished:
    """Trained and dropped groups of steps before F, in an ended run all groups."""

    def __init__(self, groups: Iterable[FinishedGroup] = ()) -> None:
        self._recent: dict[str, FinishedGroup] = {}
        self._blocks: list[_Block] = []
        """Largest first."""
        self._reasons: dict[str, int] = {}
        self._counts: dict[Status, int] = {}
        for group in groups:
            self.restore(group)

    def __len__(self) -> int:
        return sum(self._counts.values())

    def __iter__(self) -> Iterator[FinishedGroup]:
        """In the order in which they were offered."""
        return iter(self.since(-1))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Finished) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def get(self, group: str) -> FinishedGroup | None:
        found = self._recent.get(group)
        if found is not None:
            return found
        for block in self._blocks:
            place = block.find(group)
            if place is not None:
                return block.group(place, tuple(self._reasons))
        return None

    def count(self, status: Status) -> int:
        return self._counts.get(status, 0)

    def add(self, group: Group) -> None:
        self.restore(
            FinishedGroup(
                group.id, group.order, group.status, group.step, group.attempts, group.reason, group.prompt.digest
            )
        )

    def restore(self, group: FinishedGroup) -> None:
        self._recent[group.id] = group
        self._counts[group.status] = self.count(group.status) + 1
        if len(self._recent) >= BLOCK_GROUPS:
            self._pack()

    def _pack(self) -> None:
        """Make the newest groups a block, together with earlier blocks that are no larger."""
        groups = list(self._recent.values())
        while self._blocks and len(self._blocks[-1]) <= len(groups):
            groups = [*self._of(self._blocks.pop()), *groups]
        self._recent = {}
        self._blocks.append(_Block(groups, self._reasons))

    def _of(self, block: _Block) -> list[FinishedGroup]:
        reasons = tuple(self._reasons)
        return [block.group(int(place), reasons) for place in np.flatnonzero(block.present)]

    def take(self, group: str) -> FinishedGroup | None:
        """Take a group out again."""
        found = self._recent.pop(group, None)
        for block in self._blocks if found is None else ():
            place = block.find(group)
            if place is not None:
                found = block.group(place, tuple(self._reasons))
                block.present[place] = False
                break
        if found is not None:
            self._counts[found.status] -= 1
            if not self._counts[found.status]:
                del self._counts[found.status]
        return found

    def since(self, step: int, statuses: Collection[Status] = _STATUSES) -> list[FinishedGroup]:
        """Those with one of these ends in `step` or later, in the order in which they were offered."""
        reasons = tuple(self._reasons)
        codes = [_STATUSES.index(status) for status in statuses]
        found = [g for g in self._recent.values() if g.step >= step and g.status in statuses]
        for block in self._blocks:
            wanted = block.present & (block.steps >= step) & np.isin(block.statuses, codes)
            found += [block.group(int(place), reasons) for place in np.flatnonzero(wanted)]
        return sorted(found, key=lambda group: group.order)

    def copy(self) -> Finished:
        """For a snapshot that is written while this goes on changing."""
        other = Finished()
        other._recent, other._reasons = dict(self._recent), dict(self._reasons)
        other._blocks, other._counts = [block.copy() for block in self._blocks], dict(self._counts)
        return other
