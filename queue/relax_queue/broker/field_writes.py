"""A role adds its column to rows: one block per group, so that each is freed with its group."""

from collections.abc import Sequence
from dataclasses import dataclass

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import AlreadyExists, InvalidInput, UnknownRow, WrongWriter
from relax_common.rows import Field, RowKey
from relax_queue.broker.run_broker import RunBroker
from relax_queue.rows import row_keys
from relax_queue.rows.column_block import Column, encode, take
from relax_queue.rows.columns import check_column, decode_block
from relax_queue.rows.row_keys import RowKeys, block_from
from relax_queue.rules import events as ev
from relax_queue.rules.state import RunState
from relax_queue.rules.transaction import Decision, fence
from relax_queue.storage.payload import Payload, missing_units, units_of
from relax_queue.transport.intake import Buffer


@dataclass(frozen=True, slots=True)
class GroupColumn:
    """The values of one group; `units` are their keys in order."""

    group: str
    units: RowKeys
    content: bytes
    column: Column


async def receive_field(run: RunBroker, header: pb.WriteFieldHeader, payload: Buffer) -> None:
    """Check and store a column. A repeat with the same values changes nothing; with other values it is
    ALREADY_EXISTS."""
    field, rows = run.state.spec.field(header.field), block_from(header.rows)
    if field.writer != header.role:
        raise WrongWriter(f"field {field.name} is written by {field.writer}, not by {header.role}")
    for group in rows.groups:
        run.state.group(group)  # before any work is done for it
    columns = decode_block(payload, f"field {field.name}")
    if set(columns) != {field.name}:
        raise InvalidInput(f"WriteField of {field.name}: the column block has columns {sorted(columns)}")
    order = tuple(units_of(field, rows))
    check_column(run.state.spec, field, columns.entries[field.name], len(order))
    parts = split(field, columns[field.name], order)
    await run.transact(
        lambda decision: write_field(decision, run, header.role, header.term, field, parts), wanted_bytes=len(payload)
    )


def split(field: Field, column: Column, order: Sequence[RowKey]) -> list[GroupColumn]:
    """One column per group."""
    places: dict[str, list[int]] = {}
    for i, (group, _, _) in enumerate(order):
        places.setdefault(group, []).append(i)
    parts = []
    for group, at in places.items():
        block = encode({field.name: take(column, at)})
        own = decode_block(block, field.name)[field.name]
        parts.append(GroupColumn(group, row_keys.keys_of([order[i] for i in at]), block, own))
    return parts


def write_field(
    decision: Decision, run: RunBroker, role: str, term: int, field: Field, parts: Sequence[GroupColumn]
) -> None:
    """Log and keep the columns that are new."""
    fresh = [part for part in parts if _is_fresh(decision.state, run.payload, field, part)]
    fence(decision, role, term)
    for part in fresh:
        block = decision.state.next_block
        run.keep(block, part.content)
        decision.emit(ev.FieldStored(part.group, field.name, block, len(part.content), part.units))
        run.payload.add(block, len(part.content), {field.name: part.column})


def _is_fresh(state: RunState, payload: Payload, field: Field, part: GroupColumn) -> bool:
    found = state.group(part.group)
    known_rows, known_samples = set(found.rows.keys.segments()), set(found.samples)
    for _, sample, segment in part.units:
        known = (sample, segment) in known_rows if field.scope == "row" else sample in known_samples
        if not (known or (field.scope == "group" and found.rows)):
            raise UnknownRow(f"row {part.group}/{sample}/{segment} is not stored (any more)")
    missing = missing_units(found, field, part.units)
    if len(missing) == len(part.units):
        return True
    if missing:
        raise AlreadyExists(f"field {field.name} of group {part.group} is written for some of these rows already")
    stored = payload.gather(state, part.units, [field.name])[field.name]
    # Bytes are compared, so that a repeated NaN is a repeat.
    if any(stored.unit(i).tobytes() != part.column.unit(i).tobytes() for i in range(len(part.units))):
        raise AlreadyExists(f"field {field.name} of group {part.group} was written with other values")
    return False
