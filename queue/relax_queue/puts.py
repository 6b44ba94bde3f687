"""From a put's frames to its command: payload checks first, the state's word after."""

import xxhash

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import InvalidInput
from relax_common.versions import PolicyVersion
from relax_queue import wire
from relax_queue.columns import check_put, decode_extent, row_facts, sample_facts
from relax_queue.decision import Decision
from relax_queue.extent import Column
from relax_queue.putting import PutCommand, put
from relax_queue.run import Run


async def receive_put(run: Run, header: pb.PutHeader, payload: bytes | bytearray, *, returns: bool, end: float) -> str:
    """Check, store and complete in one transaction; the disposition of the group."""
    command, columns = _command(run, header, payload, returns)
    versions = set(map(PolicyVersion.unpack, {v for row in command.rows for v in row.versions}))
    # A server may have swapped to a version whose record is still on its way here; I2 is checked against the record.
    await run.waits.until(
        "Put",
        header.server,
        lambda: True if not any(run.state.is_ahead(v) for v in versions) else None,
        lambda: f"the dcs record of version {max(versions)}; the head applied is version {run.state.head}",
        end,
    )

    def store(decision: Decision) -> str:
        disposition, extent = put(decision, command)
        if extent is not None:
            run.keep(extent, payload)
            run.payload.add(extent, command.n_bytes, columns)
        return disposition

    return await run.transact(store, wanted_bytes=len(payload))


def _command(
    run: Run, header: pb.PutHeader, payload: bytes | bytearray, returns: bool
) -> tuple[PutCommand, dict[str, Column]]:
    rows = wire.keys_from(header.rows)
    group = header.lease.group
    if bool(rows) != bool(payload):
        raise InvalidInput(f"a put for group {group} names {len(rows)} rows and carries {len(payload)} bytes")
    columns = decode_extent(payload, f"put for group {group}") if payload else {}
    check_put(run.state.spec, columns, rows, group)
    digest = xxhash.xxh3_128(payload)
    digest.update(repr((rows, header.completes_group, header.reason, returns)).encode())
    command = PutCommand(
        server=header.server,
        term=header.term,
        group=group,
        attempt=header.lease.attempt,
        rows=row_facts(columns, rows),
        samples=sample_facts(columns, rows),
        fields=tuple(columns),
        n_bytes=len(payload),
        digest=digest.hexdigest(),
        outcome=wire.outcome(header.completes_group),
        returns=returns,
        reason=header.reason,
        generation_start_unix_seconds=header.generation_start_unix_seconds,
        generation_end_unix_seconds=header.generation_end_unix_seconds,
    )
    return command, columns
