"""How the broker copes with waiting readers, many clients and many rows."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.bus.broker import QueueDaemon
from benchmarks.bus.dcs_log import DcsLog
from benchmarks.bus.measure import quantile, rss_bytes
from relax.queue.v1 import queue_pb2 as pb
from relax.queue.v1 import queue_pb2_grpc
from relax_common.rpc.channels import aio_channel, sync_channel
from relax_queue.client import ROW_FIELDS, Column, QueueClient, block_to, keys_of_samples, to_columns

SCOPES = {"row": pb.SCOPE_ROW, "sample": pb.SCOPE_SAMPLE, "group": pb.SCOPE_GROUP}
SAMPLES = 16
IDLE_WAITERS = 64
WAKE_UPS = 300
CALLS = 5000
CALLS_AT_ONCE = 8
TOKENS = 256
RECORD_BYTES = 2048
"""Approximate size of a put and its plan in the log"""


def _spec(groups_open: int, prompts_per_step: int = 1) -> pb.RunSpec:
    fields = [
        pb.Field(name=f.name, dtype=f.dtype, shape=f.shape, scope=SCOPES[f.scope], writer=f.writer) for f in ROW_FIELDS
    ]
    return pb.RunSpec(
        fields=fields,
        consumers=[
            pb.Consumer(name=name, fields=["tokens"], needs_version=pb.NEEDS_VERSION_ANY) for name in ("actor", "idle")
        ],
        prompts_per_step=prompts_per_step,
        samples_per_prompt=SAMPLES,
        max_staleness=groups_open,
        snapshot_every=1,
        tokens_per_row_max=TOKENS,
        tokens_per_microbatch=1 << 20,
        data_parallel_size=1,
        packer=pb.PACKER_TOKEN_BUDGET,
        stale_policy=pb.STALE_POLICY_WAIT,
        min_valid_samples=2,
        memory_budget_bytes=1 << 40,
        lease_ttl_seconds=3600.0,
    )


def _columns(n_tokens: int) -> dict[str, Column]:
    mask = [0] + [1] * (n_tokens - 1)
    return to_columns(
        {
            "tokens": [np.arange(n_tokens)] * SAMPLES,
            "loss_mask": [mask] * SAMPLES,
            "log_probs": [np.zeros(n_tokens)] * SAMPLES,
            "versions": [np.where(mask, 0, -1)] * SAMPLES,
            "temperature": [1.0] * SAMPLES,
            "reward": [float(s % 2) for s in range(SAMPLES)],
            "reward_status": [0] * SAMPLES,
        }
    )


class _Run:
    """A run that has version 0, and what a rollout server does in it."""

    def __init__(self, daemon: QueueDaemon, spec: pb.RunSpec, n_groups: int) -> None:
        self.client, self.log = QueueClient(daemon.address, "scale"), DcsLog()
        self.client.open_run(spec, "bench", self.log.address)
        groups = [pb.PromptGroup(group=f"g{i}", position=i, prompt_json='"2 + 2 ="') for i in range(n_groups)]
        for start in range(0, n_groups, 500):
            self.client.offer_groups(groups[start : start + 500], term=1)
        self.log.commit_and_serve("bench", 0)

    def leases(self, credits: int) -> list[pb.LeaseGroupsResponse]:
        return list(self.client.lease_groups("bench", 1, credits, 60.0))

    def put(self, lease: pb.LeaseGroupsResponse, columns: dict[str, Column]) -> None:
        group = lease.group.group
        header = pb.PutHeader(
            run="scale",
            server="bench",
            term=1,
            lease=pb.LeaseKey(group=group, attempt=lease.attempt),
            rows=block_to(keys_of_samples(group, range(SAMPLES))),
            completes_group=pb.GROUP_OUTCOME_OK,
        )
        assert self.client.put(header, columns) == "accepted"

    def stop(self) -> None:
        self.client.end()
        self.client.close()
        self.log.stop()


def wake_up() -> dict[str, Any]:
    """Time from the beginning of a put until a reader in another process has the plan that the put completes."""
    with QueueDaemon() as daemon, ExitStack() as started:
        run = _Run(daemon, _spec(groups_open=4), WAKE_UPS + 2)
        started.callback(run.stop)
        _start(started, _idle, daemon.address)
        reader = _start(started, _reader, daemon.address)
        _until_waiting(run.client, IDLE_WAITERS)
        seconds, empty, fsyncs = [], [], []
        with tempfile.TemporaryFile() as file:
            file.write(bytes(WAKE_UPS * RECORD_BYTES))
            file.flush()
            for step in range(WAKE_UPS):
                seconds.append(_one_wake_up(reader, run, step))
                empty.append(_empty_call(run))
                fsyncs.append(_one_fsync(file.fileno(), step * RECORD_BYTES))
    return {
        "what": "put to waiting reader",
        "idle waiters": IDLE_WAITERS,
        "wake-ups": WAKE_UPS,
        "p50_ms": 1e3 * statistics.median(seconds),
        "p99_ms": 1e3 * quantile(seconds, 0.99),
        "p50_ms of a call that does nothing, from the same rest": 1e3 * statistics.median(empty),
        "p50_ms of an fsync of as many bytes": 1e3 * statistics.median(fsyncs),
        "target": "p50 < 5 ms, p99 < 20 ms",
    }


def _start(started: ExitStack, work: Callable[[str, Connection], None], address: str) -> Connection:
    """A process that works until its pipe closes; like a rollout server or trainer it is a separate process."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=work, args=(address, theirs), daemon=True)
    process.start()
    theirs.close()
    started.callback(process.join, 10.0)
    started.callback(ours.close)
    return ours


def _idle(address: str, pipe: Connection) -> None:
    request = pb.GetPlanRequest(run="scale", consumer="idle", term=1, step=1 << 40)
    channels = [sync_channel(address) for _ in range(IDLE_WAITERS)]
    calls = [queue_pb2_grpc.QueueServiceStub(c).GetPlan.future(request, timeout=600.0) for c in channels]
    _next(pipe)
    for call in calls:
        call.cancel()


def _reader(address: str, pipe: Connection) -> None:
    client = QueueClient(address, "scale")
    while (step := _next(pipe)) is not None:
        answer = client.get_plan("actor", 1, 0, step, 0)
        woken = time.perf_counter()  # the same clock in all processes of a host
        assert answer.chunk is not None
        pipe.send(woken)


def _next(pipe: Connection) -> int | None:
    """None when the other end was closed."""
    try:
        return int(pipe.recv())
    except EOFError:
        return None


def _until_waiting(client: QueueClient, count: int) -> None:
    end = time.monotonic() + 60.0
    while len(client.status().waits) < count:
        if time.monotonic() > end:
            raise SystemExit(f"queue_bench: {count} readers did not come to wait within 60 s")
        time.sleep(0.01)


def _one_wake_up(reader: Connection, run: _Run, step: int) -> float:
    (lease,) = run.leases(1)
    columns = _columns(32)
    columns["versions"] = Column("row", np.where(columns["loss_mask"].values, step, -1), columns["versions"].offsets)
    reader.send(step)
    _until_waiting(run.client, IDLE_WAITERS + 1)
    begun = time.perf_counter()
    run.put(lease, columns)
    woken = float(reader.recv())
    close = run.client.get_plan("actor", 1, 0, step, 1).close
    assert close is not None
    run.log.commit_and_serve("bench", step + 1, close.groups, close.plan_digest)
    return woken - begun


def _empty_call(run: _Run) -> float:
    """Time of an empty call to the broker and back; like a put, it follows a pause and a call."""
    time.sleep(0.01)
    run.client.status()
    begun = time.perf_counter()
    run.client.renew_leases("bench", 1, [])
    return time.perf_counter() - begun


def _one_fsync(fd: int, position: int) -> float:
    """Time of an fsync of bytes that replace others in a file, as in the queue's log."""
    begun = time.perf_counter()
    os.pwrite(fd, bytes([1]) * RECORD_BYTES, position)
    os.fdatasync(fd)
    return time.perf_counter() - begun


def many_clients(n_clients: int, n_rows: int) -> dict[str, Any]:
    """Renewals by random clients, some at a time, while all are connected and the rows are there."""
    n_groups = -(-n_rows // SAMPLES)
    with QueueDaemon() as daemon:
        before = daemon.memory_bytes()
        run = _Run(daemon, _spec(groups_open=2, prompts_per_step=n_groups), n_groups + 1)
        columns = _columns(TOKENS)
        begun = time.perf_counter()
        for _ in range(0, n_groups, 500):
            for lease in run.leases(min(500, n_groups)):
                run.put(lease, columns)
                n_groups -= 1
        fill_seconds = time.perf_counter() - begun
        held = run.client.status().bytes_held
        seconds = asyncio.run(_calls(daemon.address, n_clients))
        added = daemon.memory_bytes() - before
        rss = rss_bytes(daemon.pid)
        run.stop()
    return {
        "what": f"{n_clients} clients, {n_rows} rows",
        "p50_ms": 1e3 * statistics.median(seconds),
        "p99_ms": 1e3 * quantile(seconds, 0.99),
        "payload_mb": held / 1e6,
        "memory_added_mb": added / 1e6,
        "broker_rss_mb": rss / 1e6,
        "metadata_bytes_per_row": (added - held) / n_rows,
        "rows_per_second_put": n_rows / fill_seconds,
        "target": "p99 < 50 ms",
    }


async def _calls(address: str, n_clients: int) -> list[float]:
    channels = [aio_channel(address) for _ in range(n_clients)]
    stubs = [queue_pb2_grpc.QueueServiceStub(channel) for channel in channels]
    request = pb.RenewLeasesRequest(run="scale", server="bench", term=1, leases=[pb.LeaseKey(group="g0", attempt=9)])
    for start in range(0, n_clients, 50):
        await asyncio.gather(*(stub.RenewLeases(request, timeout=60.0) for stub in stubs[start : start + 50]))
    seconds: list[float] = []

    async def one_after_another() -> None:
        while len(seconds) < CALLS:
            begun = time.perf_counter()
            await random.choice(stubs).RenewLeases(request, timeout=60.0)
            seconds.append(time.perf_counter() - begun)

    await asyncio.gather(*(one_after_another() for _ in range(CALLS_AT_ONCE)))
    await asyncio.gather(*(channel.close() for channel in channels))
    return seconds


def show(console: Console, figures: dict[str, Any]) -> None:
    table = Table(title=str(figures["what"]), show_header=False)
    for name, value in figures.items():
        table.add_row(name, f"{value:.2f}" if isinstance(value, float) else str(value))
    console.print(table)
