"""The payload of a run in memory, and gathering it by row and field."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from relax_common.errors import Precondition
from relax_queue.events import RowKey
from relax_queue.extent import Column
from relax_queue.group import Group, Part
from relax_queue.run_state import RunState
from relax_queue.spec import Field


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
        return {name: self._column(state, rows, state.spec.field(name)) for name in fields}

    def _column(self, state: RunState, rows: Sequence[RowKey], field: Field) -> Column:
        units: list[npt.NDArray[np.generic]] = []
        found: dict[str, dict[RowKey, npt.NDArray[np.generic]]] = {}
        for key in units_of(field, rows):
            group = key[0]
            if group not in found:
                found[group] = self._units(state.groups[group], field)
            unit = found[group].get(key)
            if unit is None:
                raise Precondition(f"field {field.name} of row {key} is not here any more", reason="ROWS_FREED")
            units.append(unit)
        return _assemble(field, units)

    def _units(self, group: Group, field: Field) -> dict[RowKey, npt.NDArray[np.generic]]:
        """Values of a group as an extent keeps them; newer parts replace older ones."""
        units: dict[RowKey, npt.NDArray[np.generic]] = {}
        for part in group.parts:
            if field.name not in part.fields or part.extent not in self._extents:
                continue
            column = self._extents[part.extent].columns[field.name]
            keys = _keys_of(group, part, field)
            if column.offsets is None:
                units.update(zip(keys, column.values, strict=True))
                continue
            at = column.offsets.tolist()
            units.update((key, column.values[at[i] : at[i + 1]]) for i, key in enumerate(keys))
        return units


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


def _assemble(field: Field, parts: list[npt.NDArray[np.generic]]) -> Column:
    if not field.ragged:
        return Column(field.scope, np.stack(parts) if parts else np.zeros((0, *field.stored_shape), field.dtype))
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(p) for p in parts], out=offsets[1:])
    values = np.concatenate(parts) if parts else np.zeros((0, *field.stored_shape), field.dtype)
    return Column(field.scope, values, offsets, field.transposed)


def missing_units(group: Group, field: Field, keys: Iterable[RowKey]) -> list[RowKey]:
    """Keys of one group whose value of `field` nobody has written yet."""
    written = {k for part in group.parts if field.name in part.fields for k in _keys_of(group, part, field)}
    return [k for k in keys if k not in written]


def unwritten(state: RunState, field: Field, rows: Sequence[RowKey]) -> list[RowKey]:
    """Keys of the values of `field` over `rows` that its writer has not written yet."""
    by_group: dict[str, list[RowKey]] = {}
    for key in units_of(field, rows):
        by_group.setdefault(key[0], []).append(key)
    return [key for group, keys in by_group.items() for key in missing_units(state.group(group), field, keys)]
