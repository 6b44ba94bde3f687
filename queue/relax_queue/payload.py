"""The payload of a run in memory, and gathering it by row and field."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from relax_common.errors import Precondition
from relax_queue.columns import samples_in_order
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
        by_group: dict[str, list[RowKey]] = {}
        for key in rows:
            by_group.setdefault(key[0], []).append(key)
        units: dict[RowKey, npt.NDArray[np.generic]] = {}
        for group, keys in by_group.items():
            found = state.groups[group]
            if field.scope == "group":
                units[(group, -1, -1)] = self._unit(found, field, (group, -1, -1))
                continue
            wanted = keys if field.scope == "row" else [(group, s, -1) for s in samples_in_order(keys)]
            for unit_key in wanted:
                units[unit_key] = self._unit(found, field, unit_key)
        order = _unit_order(rows, field.scope)
        return _assemble(field, [units[key] for key in order])

    def _unit(self, group: Group, field: Field, key: RowKey) -> npt.NDArray[np.generic]:
        for part in reversed(group.parts):
            at = _position(part, field, key)
            if at is not None and part.extent in self._extents:
                return self._extents[part.extent].columns[field.name].unit(at)
        raise Precondition(f"field {field.name} of row {key} is not here any more", reason="ROWS_FREED")


def _position(part: Part, field: Field, key: RowKey) -> int | None:
    if field.name not in part.fields:
        return None
    if field.scope == "group":
        return 0
    if field.scope == "sample":
        return part.samples.index(key[1]) if key[1] in part.samples else None
    segment = (key[1], key[2])
    return part.rows.index(segment) if segment in part.rows else None


def _unit_order(rows: Sequence[RowKey], scope: str) -> list[RowKey]:
    if scope == "row":
        return list(rows)
    if scope == "sample":
        return [(g, s, -1) for g, s in dict.fromkeys((g, s) for g, s, _ in rows)]
    return [(g, -1, -1) for g in dict.fromkeys(g for g, _, _ in rows)]


def _assemble(field: Field, units: list[npt.NDArray[np.generic]]) -> Column:
    if not field.ragged:
        return Column(field.scope, np.stack(units) if units else np.zeros((0, *field.stored_shape), field.dtype))
    parts = [u.T if field.transposed else u for u in units]
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(p) for p in parts], out=offsets[1:])
    values = np.concatenate(parts) if parts else np.zeros((0, *field.stored_shape), field.dtype)
    return Column(field.scope, values, offsets, field.transposed)


def missing_units(group: Group, field: Field, keys: Iterable[RowKey]) -> list[RowKey]:
    """Keys of one group whose value of `field` nobody has written yet."""
    return [k for k in keys if not any(_position(part, field, k) is not None for part in group.parts)]
