"""A role adds its column to rows."""

from collections.abc import Mapping, Sequence

import numpy as np

from relax_common.errors import AlreadyExists, NotFound, Precondition
from relax_queue import events as ev
from relax_queue.columns import samples_in_order
from relax_queue.decision import Decision, fence
from relax_queue.extent import Column
from relax_queue.payload import Payload, missing_units
from relax_queue.run_state import RunState
from relax_queue.spec import Field


def units_by_group(field: Field, rows: Sequence[ev.RowKey]) -> dict[str, list[ev.RowKey]]:
    """Keys of the values in a column over `rows`, in their order, by group."""
    by_group: dict[str, list[ev.RowKey]] = {}
    for group in dict.fromkeys(g for g, _, _ in rows):
        keys = [k for k in rows if k[0] == group]
        if field.scope == "sample":
            keys = [(group, s, 0) for s in samples_in_order(keys)]
        by_group[group] = keys if field.scope != "group" else [(group, 0, 0)]
    return by_group


def write_field(
    decision: Decision, payload: Payload, role: str, term: int, field: Field, parts: Mapping[str, tuple[int, Column]],
    rows: Sequence[ev.RowKey],
) -> dict[int, Column]:  # fmt: skip
    """Store one extent a group; {extent: column}. A repeat with the same values changes nothing, others are refused."""
    state = decision.state
    if field.writer != role:
        raise Precondition(f"field {field.name} is written by {field.writer}, not by {role}", reason="WRONG_WRITER")
    units = units_by_group(field, rows)
    fresh = [g for g in units if _is_fresh(state, payload, field, g, units[g], parts[g][1])]
    fence(decision, role, term)
    stored: dict[int, Column] = {}
    for group in fresh:
        extent = state.next_extent
        n_bytes, column = parts[group]
        keys = tuple((s, t) for _, s, t in units[group])
        decision.emit(ev.FieldStored(group, field.name, extent, n_bytes, keys))
        stored[extent] = column
    return stored


def _is_fresh(
    state: RunState, payload: Payload, field: Field, group: str, units: Sequence[ev.RowKey], column: Column
) -> bool:
    found = state.group(group)
    for _, sample, segment in units:
        known = (sample, segment) in found.rows if field.scope == "row" else sample in found.samples
        if field.scope != "group" and not known:
            raise NotFound(f"row {group}/{sample}/{segment} is not here any more", reason="UNKNOWN_ROW")
    missing = missing_units(found, field, units)
    if len(missing) == len(units):
        return True
    if missing:
        raise AlreadyExists(f"field {field.name} of group {group} is written for some of these rows already")
    stored = payload.gather(state, list(units), [field.name])[field.name]
    same = all(np.array_equal(stored.unit(i), column.unit(i), equal_nan=False) for i in range(len(units)))
    if not same:
        raise AlreadyExists(f"field {field.name} of group {group} was written with other values")
    return False
