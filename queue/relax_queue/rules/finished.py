"""Groups whose end no replay can change any more, as columns of some sixty bytes per group: a run may have millions.

The newest groups are objects; each thousand of them becomes a block, and small blocks of similar size are merged, so
that there are few to search. Only a rollback past F, or the end of the run, takes a group out of its block again. No
work here, nor the writing of a snapshot, needs memory for more than one block: freed memory stays with the process.
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
MERGED_GROUPS = 32 * BLOCK_GROUPS
"""Blocks of this size are not merged any more."""
_STATUSES = tuple(Status)
"""Snapshots name a status by its place here."""


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


_DTYPES = {
    "ends": "<i8",
    "orders": "<i8",
    "steps": "<i8",
    "attempts": "<i4",
    "statuses": "<u1",
    "reasons": "<u2",
    "digests": "<u8",
    "hashes": "<u8",
}


@dataclass(frozen=True, slots=True)
class Columns:
    """Groups as columns, none of which ever changes. `names`: all names one after the other, `ends`: where each ends;
    `hashes`: of the names; `reasons`: places in a list of reasons that several blocks share."""

    names: bytes
    ends: npt.NDArray[np.int64]
    orders: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    attempts: npt.NDArray[np.int32]
    statuses: npt.NDArray[np.uint8]
    reasons: npt.NDArray[np.uint16]
    digests: npt.NDArray[np.uint64]
    hashes: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, groups: Sequence[FinishedGroup], reasons: dict[str, int]) -> Columns:
        """Reasons that are not in `reasons` yet are added to it."""
        names = [group.id.encode() for group in groups]
        columns = {
            "ends": np.cumsum([len(name) for name in names], dtype=np.int64),
            "orders": [group.order for group in groups],
            "steps": [group.step for group in groups],
            "attempts": [group.attempts for group in groups],
            "statuses": [_STATUSES.index(group.status) for group in groups],
            "reasons": [reasons.setdefault(group.reason, len(reasons)) for group in groups],
            "digests": [group.prompt_digest for group in groups],
            "hashes": [xxhash.xxh3_64_intdigest(name) for name in names],
        }
        return cls(b"".join(names), **{name: np.array(columns[name], dtype) for name, dtype in _DTYPES.items()})

    @classmethod
    def joined(cls, parts: Sequence[Columns]) -> Columns:
        starts = np.cumsum([0, *(len(part.names) for part in parts)], dtype=np.int64)
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _DTYPES}
        arrays["ends"] = np.concatenate([part.ends + start for part, start in zip(parts, starts, strict=False)])
        return cls(b"".join(part.names for part in parts), **arrays)

    @classmethod
    def from_bytes(cls, content: dict[str, bytes]) -> Columns:
        return cls(content["names"], **{name: np.frombuffer(content[name], dtype) for name, dtype in _DTYPES.items()})

    def to_bytes(self) -> dict[str, bytes]:
        return {"names": self.names, **{name: getattr(self, name).tobytes() for name in _DTYPES}}

    def __len__(self) -> int:
        return len(self.ends)

    def name(self, place: int) -> bytes:
        start = int(self.ends[place - 1]) if place else 0
        return self.names[start : int(self.ends[place])]

    def only(self, present: npt.NDArray[np.bool_]) -> Columns:
        """Without the groups that are not present."""
        if present.all():
            return self
        names = [self.name(int(place)) for place in np.flatnonzero(present)]
        arrays = {name: getattr(self, name)[present] for name in _DTYPES}
        arrays["ends"] = np.cumsum([len(name) for name in names], dtype=np.int64)
        return Columns(b"".join(names), **arrays)

    def group(self, place: int, reasons: Sequence[str]) -> FinishedGroup:
        return FinishedGroup(
            self.name(place).decode(),
            int(self.orders[place]),
            _STATUSES[self.statuses[place]],
            int(self.steps[place]),
            int(self.attempts[place]),
            reasons[self.reasons[place]],
            int(self.digests[place]),
        )


class _Block:
    """Columns in which groups are found by name; `present` is false for those that were taken out."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self._by_hash = np.argsort(columns.hashes, kind="stable")
        self.present: npt.NDArray[np.bool_] = np.ones(len(columns), np.bool_)

    def __len__(self) -> int:
        return len(self.present)

    def find(self, name: str) -> int | None:
        """Where a group is."""
        content, hashes = name.encode(), self.columns.hashes
        wanted = np.uint64(xxhash.xxh3_64_intdigest(content))
        at = int(np.searchsorted(hashes, wanted, sorter=self._by_hash))
        while at < len(self) and hashes[self._by_hash[at]] == wanted:
            place = int(self._by_hash[at])
            if self.present[place] and self.columns.name(place) == content:
                return place
            at += 1
        return None

    def content(self) -> Columns:
        return self.columns.only(self.present)

    def copy(self) -> _Block:
        """The columns are shared."""
        other = object.__new__(_Block)
        other.__dict__.update(self.__dict__)
        other.present = self.present.copy()
        return other


class Finished:
    """Trained and dropped groups of steps before F, in an ended run all groups."""

    def __init__(self, groups: Iterable[FinishedGroup] = ()) -> None:
        self._recent: dict[str, FinishedGroup] = {}
        self._blocks: list[_Block] = []
        """Largest first, so that the last ones are merged."""
        self._reasons: dict[str, int] = {}
        self._counts: dict[Status, int] = {}
        for group in groups:
            self.restore(group)

    @classmethod
    def from_columns(cls, blocks: Iterable[Columns], reasons: Sequence[str]) -> Finished:
        finished = cls()
        finished._reasons = {reason: i for i, reason in enumerate(reasons)}
        for columns in blocks:
            finished._blocks.append(_Block(columns))
            for status, count in zip(*np.unique(columns.statuses, return_counts=True), strict=True):
                finished._counts[_STATUSES[status]] = finished.count(_STATUSES[status]) + int(count)
        finished._blocks.sort(key=len, reverse=True)
        return finished

    def columns(self) -> tuple[list[str], Iterator[Columns]]:
        """(reasons, blocks) from which the same can be made; a block is made when it is asked for."""
        newest = Columns.of(list(self._recent.values()), self._reasons)
        return list(self._reasons), (part for part in (*(b.content() for b in self._blocks), newest) if len(part))

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
                return block.columns.group(place, tuple(self._reasons))
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
        parts = [Columns.of(list(self._recent.values()), self._reasons)]
        size = len(parts[0])
        while self._blocks and len(self._blocks[-1]) <= size < MERGED_GROUPS:
            parts.insert(0, self._blocks.pop().content())
            size += len(parts[0])
        self._recent = {}
        self._blocks.append(_Block(Columns.joined(parts)))

    def take(self, group: str) -> FinishedGroup | None:
        """Take a group out again."""
        found = self._recent.pop(group, None)
        for block in self._blocks if found is None else ():
            place = block.find(group)
            if place is not None:
                found = block.columns.group(place, tuple(self._reasons))
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
            columns = block.columns
            wanted = block.present & (columns.steps >= step) & np.isin(columns.statuses, codes)
            found += [columns.group(int(place), reasons) for place in np.flatnonzero(wanted)]
        return sorted(found, key=lambda group: group.order)

    def copy(self) -> Finished:
        """For a snapshot that is written while this goes on changing."""
        other = Finished()
        other._recent, other._reasons = dict(self._recent), dict(self._reasons)
        other._blocks, other._counts = [block.copy() for block in self._blocks], dict(self._counts)
        return other
