"""Follows the dcs log of one run, record by record, for as long as the run lives."""

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio

from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc
from relax_common.errors import Exhausted, RelaxError, from_rpc
from relax_common.failpoints import failpoint
from relax_common.process.telemetry import get_logger
from relax_common.rpc.channels import Backoff, aio_channel
from relax_queue.broker.metrics import FOLLOW_RECONNECTS
from relax_queue.broker.run_broker import RunBroker
from relax_queue.rules import following
from relax_queue.rules.transaction import Decision

STREAM_SECONDS = 600.0
"""A stream is reopened after this time, so that none hangs on a peer that went away silently."""


async def follow(run: RunBroker) -> None:
    """Follow until the run has ended, reconnecting with back-off. Raises LogGap if records are missing."""
    backoff = Backoff()
    while not run.ended:
        before = run.state.applied_revision
        try:
            await _follow_stream(run)
        except Exhausted as full:
            get_logger().error("disk_full", run=run.state.run, error=full.message)
        except grpc.RpcError as rpc_error:
            error = from_rpc(rpc_error)
            if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                continue
            FOLLOW_RECONNECTS.labels(run.state.run).inc()
            get_logger().info("dcs_log_lost", run=run.state.run, dcs=run.state.dcs_address, error=error.message)
        if run.state.applied_revision > before:
            backoff = Backoff()
        await asyncio.sleep(backoff.next_seconds())


async def _follow_stream(run: RunBroker) -> None:
    address = run.state.dcs_address
    async with aio_channel(address) as channel:
        stub = dcs_pb2_grpc.DcsServiceStub(channel)
        request = dcs_pb2.WatchLogRequest(run=run.state.run, after_revision=run.state.applied_revision)
        async for response in stub.WatchLog(request, timeout=STREAM_SECONDS):
            await apply_record(run, response.record)
            if run.ended or run.state.dcs_address != address:
                return


async def apply_record(run: RunBroker, record: dcs_pb2.LogRecord) -> None:
    """Apply one record in one transaction."""
    command = _command(record)
    if record.WhichOneof("record") != "commit":
        await run.transact(command, reserve=True)
        return
    failpoint("queue.before_apply_commit")
    await run.transact(command, reserve=True)
    failpoint("queue.after_apply_commit")


def _command(record: dcs_pb2.LogRecord) -> Callable[[Decision], None]:
    revision, kind = record.revision, record.WhichOneof("record")
    if kind == "commit":
        c = record.commit
        step = c.step if c.HasField("step") else None
        version = (c.version.lineage, c.version.number)
        return lambda d: following.commit(d, revision, step, version, tuple(c.groups), c.plan_digest)
    if kind == "confirmed":
        f = record.confirmed
        return lambda d: following.confirm(d, revision, f.server, f.term, (f.version.lineage, f.version.number))
    if kind == "snapshot":
        return lambda d: following.frontier(d, revision, record.snapshot.version.number)
    if kind == "checkpoint":
        c_version = record.checkpoint.version
        return lambda d: following.checkpoint(d, revision, (c_version.lineage, c_version.number))
    if kind == "rollback":
        return lambda d: following.rollback(d, revision, record.rollback.lineage, record.rollback.head)
    raise RelaxError(f"record {revision} of the dcs log is of a kind this release does not know; install one release")
