"""The payload of a run in memory, and gathering it by row and field."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Protocol

import numpy as np

from relax_common.errors import RowsFreed
from relax_common.rows import PRODUCER, Field, RowKey
from relax_queue.rows import row_keys
from relax_queue.rows.column_block import Column, join
from relax_queue.rows.row_keys import RowKeys, SegmentKey
from relax_queue.rules.group import Group, Part
from relax_queue.rules.state import RunState

Span = tuple[int, int, int]
"""Consecutive units of a block: the block, the first unit and the one after the last"""


class Home(Protocol):
    """The owner of a block's bytes, if they are not on the heap."""

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes of a block and the columns that view them."""

    n_bytes: int
    columns: Mapping[str, Column]
    home: Home | None = None


@dataclass(frozen=True, slots=True)
class Located:
    """Fields whose values are at the same places, and the places in order."""

    fields: tuple[Field, ...]
    spans: tuple[Span, ...]


class Payload:
    """Blocks by id; blocks that the state no longer names are freed."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}

    def add(self, block: int, n_bytes: int, columns: Mapping[str, Column], home: Home | None = None) -> None:
        self._blocks[block] = Block(n_bytes, columns, home)

    def block(self, block: int) -> Block:
        return self._blocks[block]

    def free(self, state: RunState) -> None:
        """Forget blocks that the state has forgotten."""
        if len(self._blocks) != len(state.blocks):
            for block in self._blocks.keys() - state.blocks.keys():
                home = self._blocks.pop(block).home
                if home is not None:
                    home.release()

    def gather(self, state: RunState, rows: RowKeys, fields: Iterable[str]) -> dict[str, Column]:
        """Columns whose units follow `rows`, samples and groups by first appearance. Raises Precondition ROWS_FREED."""
        return self.columns(self.locate(state, rows, [state.spec.field(name) for name in fields]))

    def locate(self, state: RunState, rows: RowKeys, fields: Sequence[Field]) -> list[Located]:
        """The places of the values of `rows`. Raises Precondition ROWS_FREED."""
        groups = [state.groups[name] for name in rows.groups]
        together: dict[tuple[str, tuple[int, ...]], tuple[list[Field], list[list[Part]]]] = {}
        for field in fields:
            parts = [[p for p in group.parts if field.name in p.fields and p.block in self._blocks] for group in groups]
            # Fields that arrived together are at the same places, which are looked up once for all of them.
            same = (field.scope, tuple(part.block for of_group in parts for part in of_group))
            together.setdefault(same, ([], parts))[0].append(field)
        return [
            Located(tuple(alike), _spans(alike[0], dict(zip((g.id for g in groups), parts, strict=True)), rows))
            for alike, parts in together.values()
        ]

    def locate_written(self, state: RunState, rows: RowKeys, fields: Sequence[Field]) -> list[Located] | None:
        """The same; None while a field has not been written for all of `rows`."""
        if self.unwritten(state, rows, fields):
            return None
        return self.locate(state, rows, fields)

    def unwritten(self, state: RunState, rows: RowKeys, fields: Sequence[Field]) -> list[Field]:
        """The `fields` that their writer has not yet written for all of `rows`."""
        groups = [state.group(name) for name in rows.groups]
        wanted: dict[str, dict[str, list[RowKey]]] = {}
        found = []
        for field in fields:
            # A group is planned only after its producer has put all its fields, so only columns of other roles can be
            # missing.
            if field.writer == PRODUCER:
                continue
            if field.scope not in wanted:
                wanted[field.scope] = {
                    group: list(keys) for group, keys in groupby(sorted(units_of(field, rows)), itemgetter(0))
                }
            if any(missing_units(group, field, wanted[field.scope][group.id]) for group in groups):
                found.append(field)
        return found

    def columns(self, located: Iterable[Located]) -> dict[str, Column]:
        """Columns over the places; views if there is only one span."""
        return {field.name: self._column(field, part.spans) for part in located for field in part.fields}

    def n_bytes(self, located: Iterable[Located]) -> int:
        """Bytes of the columns over the places, accurate to a few per cent: ragged units count as equal."""
        total = 0.0
        for part in located:
            for block, start, end in part.spans:
                columns = self._blocks[block].columns
                found = (columns[field.name] for field in part.fields)
                total += sum(c.values.nbytes / max(1, c.units) for c in found) * (end - start)
        return int(total)

    def _column(self, field: Field, spans: Sequence[Span]) -> Column:
        columns = {block: self._blocks[block].columns[field.name] for block, _, _ in spans}
        return join([(columns[block], start, end) for block, start, end in spans]) or _nothing(field)


def _spans(field: Field, parts: Mapping[str, Sequence[Part]], rows: RowKeys) -> tuple[Span, ...]:
    """Places of the units of `rows` in order; newer parts replace older ones."""
    spans: list[Span] = []
    newest_units = {group: _units(of_group[-1], field) if of_group else [] for group, of_group in parts.items()}
    known: dict[str, dict[SegmentKey, Span]] = {}
    for group, wanted in units_of(field, rows).by_group():
        newest, own = parts[group][-1] if parts[group] else None, newest_units[group]
        if newest and own == wanted:
            _extend(spans, (newest.block, 0, sum(count for _, _, count in wanted)))
            continue
        for first, segment, count in wanted:
            if newest and len(own) == 1 and own[0][1] == segment and 0 <= first - own[0][0] <= own[0][2] - count:
                at = first - own[0][0]
                _extend(spans, (newest.block, at, at + count))
                continue
            if group not in known:
                known[group] = _places(field, parts[group])
            for sample in range(first, first + count):
                place = known[group].get((sample, segment))
                if place is None:
                    raise RowsFreed(f"field {field.name} of row {group}/{sample}/{segment} is not stored any more")
                _extend(spans, place)
    return tuple(spans)


def _extend(spans: list[Span], place: Span) -> None:
    if spans and spans[-1][0] == place[0] and spans[-1][2] == place[1]:
        spans[-1] = (place[0], spans[-1][1], place[2])
    else:
        spans.append(place)


def _places(field: Field, parts: Sequence[Part]) -> dict[SegmentKey, Span]:
    """Where the newest value of each unit is."""
    return {
        unit: (part.block, i, i + 1)
        for part in parts
        for i, unit in enumerate(
            (sample, segment) for first, segment, count in _units(part, field) for sample in range(first, first + count)
        )
    }


def _units(part: Part, field: Field) -> list[tuple[int, int, int]]:
    """The keys to which the values of a part belong, in order, as spans."""
    if field.scope == "group":
        return [(0, 0, 1)]
    keys = part.rows if field.scope == "row" else part.rows.samples()
    return [span for _, spans in keys.by_group() for span in spans]


def _nothing(field: Field) -> Column:
    offsets = np.zeros(1, np.int64) if field.ragged else None
    return Column(field.scope, np.zeros((0, *field.stored_shape), field.dtype), offsets, field.transposed)


def units_of(field: Field, rows: RowKeys) -> RowKeys:
    """Keys of the values in a column over `rows`; samples and groups by first appearance."""
    if field.scope == "row":
        return rows
    if field.scope == "group":
        return row_keys.keys_of([(group, 0, 0) for group in rows.groups])
    return rows.samples()


def missing_units(group: Group, field: Field, keys: Iterable[RowKey]) -> list[RowKey]:
    """Keys of one group whose value of `field` nobody has written yet."""
    written = _places(field, [part for part in group.parts if field.name in part.fields])
    return [key for key in keys if key[1:] not in written]
