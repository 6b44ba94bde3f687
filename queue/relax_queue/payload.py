"""The payload of a run in memory, and gathering it by row and field."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from relax_common.errors import ROWS_FREED, Precondition
from relax_queue.events import RowKey
from relax_queue.extent import Column, ExtentError
from relax_queue.group import Group, Part
from relax_queue.run_state import RunState
from relax_queue.spec import Field

Place = tuple[int, int]
"""An extent and which of its units"""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of an extent and the columns that view them."""

    n_bytes: int
    columns: dict[str, Column]


class Payload:
    """Extents by id; what the state does not name any more is freed."""

    def __init__(self) -> None:
        self._extents: dict[int, Extent] = {}

    def add(self, extent: int, n_bytes: int, columns: dict[str, Column]) -> None:
        self._extents[extent] = Extent(n_bytes, columns)

    def free(self, state: RunState) -> None:
        """Forget extents that the state has forgotten."""
        if len(self._extents) != len(state.extents):
            for extent in self._extents.keys() - state.extents.keys():
                del self._extents[extent]

    def gather(self, state: RunState, rows: Sequence[RowKey], fields: Iterable[str]) -> dict[str, Column]:
        """Columns whose units follow `rows`, samples and groups by first appearance. Raises Precondition ROWS_FREED."""
        found: dict[tuple[str, tuple[int, ...]], list[Place]] = {}
        columns = {}
        for name in fields:
            field = state.spec.field(name)
            parts = self._parts(state, rows, field)
            # Fields that came together stand at the same places: looked up once for all of them.
            same = (field.scope, tuple(part.extent for _, part in parts))
            if same not in found:
                found[same] = _places(parts, field, rows)
            columns[name] = self._column(field, found[same])
        return columns

    def _parts(self, state: RunState, rows: Sequence[RowKey], field: Field) -> list[tuple[Group, Part]]:
        """The extents in memory that hold the field for these groups, older ones first."""
        groups = (state.groups[name] for name in dict.fromkeys(key[0] for key in rows))
        return [
            (group, part)
            for group in groups
            for part in group.parts
            if field.name in part.fields and part.extent in self._extents
        ]

    def _column(self, field: Field, places: Sequence[Place]) -> Column:
        columns = {extent: self._extents[extent].columns[field.name] for extent, _ in places}
        if not field.ragged:
            cut = [columns[extent].values[i : i + 1] for extent, i in places]
            return Column(field.scope, np.concatenate(cut) if cut else _nothing(field))
        ends = {extent: _offsets(column) for extent, column in columns.items()}
        bounds = [(extent, ends[extent][i], ends[extent][i + 1]) for extent, i in places]
        offsets = np.zeros(len(places) + 1, np.int64)
        np.cumsum([end - start for _, start, end in bounds], out=offsets[1:])
        cut = [columns[extent].values[start:end] for extent, start, end in bounds]
        return Column(field.scope, np.concatenate(cut) if cut else _nothing(field), offsets, field.transposed)


def _places(parts: Sequence[tuple[Group, Part]], field: Field, rows: Sequence[RowKey]) -> list[Place]:
    """Where each wanted value stands; newer parts replace older ones."""
    known: dict[RowKey, Place] = {}
    for group, part in parts:
        known.update((key, (part.extent, i)) for i, key in enumerate(_keys_of(group, part, field)))
    places = []
    for key in units_of(field, rows):
        place = known.get(key)
        if place is None:
            raise Precondition(f"field {field.name} of row {key} is not here any more", reason=ROWS_FREED)
        places.append(place)
    return places


def _offsets(column: Column) -> list[int]:
    if column.offsets is None:
        raise ExtentError("a ragged field was stored without offsets")
    offsets: list[int] = column.offsets.tolist()
    return offsets


def _nothing(field: Field) -> npt.NDArray[np.generic]:
    return np.zeros((0, *field.stored_shape), field.dtype)


def units_of(field: Field, rows: Sequence[RowKey]) -> list[RowKey]:
    """Keys of the values in a column over `rows`; samples and groups by first appearance."""
    if field.scope == "row":
        return list(rows)
    if field.scope == "group":
        return [(group, 0, 0) for group in dict.fromkeys(g for g, _, _ in rows)]
    return [(group, sample, 0) for group, sample in dict.fromkeys((g, s) for g, s, _ in rows)]


def _keys_of(group: Group, part: Part, field: Field) -> list[RowKey]:
    """The same keys for the units of a part, in their order."""
    if field.scope == "row":
        return [(group.id, sample, segment) for sample, segment in part.rows]
    if field.scope == "sample":
        return [(group.id, sample, 0) for sample in part.samples]
    return [(group.id, 0, 0)]


def missing_units(group: Group, field: Field, keys: Iterable[RowKey]) -> list[RowKey]:
    """Keys of one group whose value of `field` nobody has written yet."""
    written = {k for part in group.parts if field.name in part.fields for k in _keys_of(group, part, field)}
    return [k for k in keys if k not in written]


def unwritten(state: RunState, fields: Iterable[Field], rows: Sequence[RowKey]) -> list[Field]:
    """Those of `fields` that their writer has not written yet for every one of `rows`."""
    wanted: dict[str, dict[str, list[RowKey]]] = {}
    lacking: dict[tuple[str, str, tuple[int, ...]], bool] = {}

    def lacks(field: Field, group: Group, keys: list[RowKey]) -> bool:
        # Fields that came together are there together: looked at once for all of them.
        same = (field.scope, group.id, tuple(part.extent for part in group.parts if field.name in part.fields))
        if same not in lacking:
            lacking[same] = bool(missing_units(group, field, keys))
        return lacking[same]

    found = []
    for field in fields:
        if field.scope not in wanted:
            wanted[field.scope] = {}
            for key in units_of(field, rows):
                wanted[field.scope].setdefault(key[0], []).append(key)
        if any(lacks(field, state.group(group), keys) for group, keys in wanted[field.scope].items()):
            found.append(field)
    return found
