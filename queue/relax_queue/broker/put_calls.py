"""Turns a put's header and bytes into its command: the payload is checked first, then the state decides."""

import xxhash

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import InvalidInput
from relax_common.versions import PolicyVersion
from relax_queue.broker import messages
from relax_queue.broker.run_broker import RunBroker
from relax_queue.rows.column_block import Table
from relax_queue.rows.columns import check_put, row_facts, sample_facts
from relax_queue.rows.row_keys import RowKeys, block_from
from relax_queue.rules.puts import PutCommand, put, put_key
from relax_queue.rules.transaction import Decision, stored_answer
from relax_queue.transport.incoming import Incoming


async def receive_put(run: RunBroker, header: pb.PutHeader, incoming: Incoming, *, returns: bool, end: float) -> str:
    """Check, store and complete in one transaction; returns the disposition of the group."""
    rows = block_from(header.rows)
    digest = _digest(header, incoming.digest, returns)
    # A repeat is answered before anything else is checked: its slab may by now hold these rows, or belong to someone
    # else.
    answer = stored_answer(run.state, _key(header, rows, returns), digest)
    if answer is not None:
        await run.sync()
        return answer
    command, columns = _command(run, header, rows, incoming, digest, returns)
    versions = set(map(PolicyVersion.unpack, command.rows.distinct_versions()))
    # A server may have swapped to a version whose record has not arrived here yet; I2 is checked against the record.
    await run.waits.until(
        "Put",
        header.server,
        lambda: True if not any(run.state.is_ahead(v) for v in versions) else None,
        lambda: f"the dcs record of version {max(versions)}; the head applied is version {run.state.head}",
        end,
    )

    def store(decision: Decision) -> str:
        incoming.check()
        disposition, block = put(decision, command)
        if block is not None:
            run.keep(block, incoming.content)
            run.payload.add(block, command.n_bytes, columns, incoming.take())
        return disposition

    return await run.transact(store, wanted_bytes=incoming.n_bytes)


def _key(header: pb.PutHeader, rows: RowKeys, returns: bool) -> str:
    completes = header.completes_group != pb.GROUP_OUTCOME_UNSPECIFIED
    samples = () if completes or returns else rows.sample_numbers()
    return put_key(header.lease.group, header.lease.attempt, samples, completes=completes, returns=returns)


def _digest(header: pb.PutHeader, block: int, returns: bool) -> str:
    """What a repeat must have in common with the put it repeats; the block's own digest covers its bytes."""
    content = (list(header.rows.groups), header.rows.spans, header.completes_group, header.reason, returns, block)
    return xxhash.xxh3_128_hexdigest(repr(content).encode())


def _command(
    run: RunBroker, header: pb.PutHeader, rows: RowKeys, incoming: Incoming, digest: str, returns: bool
) -> tuple[PutCommand, Table]:
    group, n_bytes = header.lease.group, incoming.n_bytes
    if bool(rows) != bool(n_bytes):
        raise InvalidInput(f"a put for group {group} names {len(rows)} rows and carries {n_bytes} bytes")
    columns = incoming.columns(f"put for group {group}")
    check_put(run.state.spec, columns.entries, rows, group)
    command = PutCommand(
        server=header.server,
        term=header.term,
        group=group,
        attempt=header.lease.attempt,
        rows=row_facts(columns.entries, rows),
        samples=sample_facts(columns.entries, rows),
        fields=tuple(columns),
        n_bytes=n_bytes,
        digest=digest,
        outcome=messages.outcome(header.completes_group),
        returns=returns,
        reason=header.reason,
        generation_start_unix_seconds=header.generation_start_unix_seconds,
        generation_end_unix_seconds=header.generation_end_unix_seconds,
    )
    return command, columns
