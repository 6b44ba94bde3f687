"""Our bus with one writer process, one reader process and the daemon."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.bus.broker import QueueDaemon
from benchmarks.bus.cases import CASES, Case, flat_values, lengths_of, payload_bytes
from benchmarks.bus.dcs_log import DcsLog
from benchmarks.bus.measure import cpu_seconds
from benchmarks.bus.result import Repetition
from relax.queue.v1 import queue_pb2 as pb
from relax_common.process.tuning import keep_freed_pages
from relax_queue.client import Column, QueueClient, TransportName, block_to, join_keys, keys_of_samples

CALL_SECONDS = 60.0


def columns_of(case: Case) -> dict[str, Column]:
    values, lengths = flat_values(case), lengths_of(case)
    if not case.ragged:
        return {f"f{i}": Column("row", values.reshape(case.samples, case.length)) for i in range(case.fields)}
    offsets = np.zeros(case.samples + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return {f"f{i}": Column("row", values, offsets) for i in range(case.fields)}


def spec_of(case: Case, groups_open: int, per_step: int) -> pb.RunSpec:
    shape = [-1] if case.ragged else [case.length]
    names = [f"f{i}" for i in range(case.fields)]
    return pb.RunSpec(
        fields=[pb.Field(name=n, dtype=case.dtype, shape=shape, scope=pb.SCOPE_ROW, writer="rollout") for n in names],
        consumers=[pb.Consumer(name="reader", fields=names, needs_version=pb.NEEDS_VERSION_ANY)],
        prompts_per_step=per_step,
        groups_per_chunk=1,
        samples_per_prompt=case.samples,
        max_staleness=groups_open,
        snapshot_every=1,
        tokens_per_row_max=4096,
        tokens_per_microbatch=1 << 30,
        data_parallel_size=1,
        packer=pb.PACKER_WHOLE_GROUPS,
        stale_policy=pb.STALE_POLICY_WAIT,
        min_valid_samples=1,
        memory_budget_bytes=1 << 45,
        lease_ttl_seconds=600.0,
    )


def _worker(pipe: Connection, address: str, transport: TransportName) -> None:
    """Writer or reader: runs the commands it gets and answers with seconds."""
    keep_freed_pages()
    pipe.send(os.getpid())
    client: QueueClient | None = None
    sent: dict[str, Column] = {}
    while (told := pipe.recv()) is not None:
        what, *rest = told
        if what == "run":
            run, case = rest
            if client is not None:
                client.close()
            client = QueueClient(address, run, transport)
            sent = columns_of(case)
            pipe.send(client.transport)
        elif what == "put" and client is not None:
            pipe.send(_put(client, rest[0], rest[1], sent))
        elif client is not None:
            pipe.send(_get(client, *rest, sent))


def _put(client: QueueClient, group: str, attempt: int, sent: dict[str, Column]) -> float:
    n = next(iter(sent.values())).units
    header = pb.PutHeader(
        run=client.run,
        server="bench",
        term=1,
        lease=pb.LeaseKey(group=group, attempt=attempt),
        rows=block_to(keys_of_samples(group, range(n))),
        completes_group=pb.GROUP_OUTCOME_OK,
    )
    begun = time.perf_counter()
    answer = client.put(header, sent)
    seconds = time.perf_counter() - begun
    assert answer == "accepted", answer
    return seconds


def _get(client: QueueClient, step: int, chunk: int, sent: dict[str, Column]) -> float:
    begun = time.perf_counter()
    answer = client.get_plan("reader", 1, 0, step, chunk)
    assert answer.chunk is not None
    rows = join_keys(batch.rows for batch in answer.chunk.ranks[0])
    got = client.read_rows(answer.plan, rows, list(sent))
    seconds = time.perf_counter() - begun
    for name, column in sent.items():
        for i in (0, column.units - 1):
            assert np.array_equal(got[name].unit(i)[-8:], column.unit(i)[-8:]), "other values came than were sent"
    return seconds


class Worker:
    """The end of a worker process that we hold."""

    def __init__(self, address: str, transport: TransportName) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_worker, args=(theirs, address, transport), daemon=True)
        self._process.start()
        self.pid: int = self._receive()

    def _receive(self) -> Any:
        if not self._pipe.poll(CALL_SECONDS):
            raise SystemExit(f"queue_bench: a worker did not answer within {CALL_SECONDS:.0f} s")
        return self._pipe.recv()

    def __call__(self, *told: Any) -> Any:
        self._pipe.send(told)
        return self._receive()

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join(10)


class Bus:
    """One transport: a run per repetition, a group per transfer."""

    def __init__(self, daemon: QueueDaemon, transport: TransportName) -> None:
        self.transport = transport
        self._daemon = daemon
        self._writer, self._reader = Worker(daemon.address, transport), Worker(daemon.address, transport)
        self._runs = 0

    def repetition(self, case: Case, warm_up: int) -> Repetition:
        """The first transfers warm up: they are neither timed nor counted."""
        with _Run(
            self._daemon, f"{self.transport}-{case.name}-{self._runs}", case, groups_open=3, per_step=case.per_step
        ) as run:
            self._runs += 1
            for worker in (self._writer, self._reader):
                worker("run", run.name, case)
            for _ in range(warm_up):
                self._transfer(run)
            pids = (self._daemon.pid, self._writer.pid, self._reader.pid)
            before = sum(map(cpu_seconds, pids))
            times = [self._transfer(run) for _ in range(case.transfers)]
            cpu = sum(map(cpu_seconds, pids)) - before
        return Repetition(payload_bytes(case) * case.transfers, cpu, [t[0] for t in times], [t[1] for t in times])

    def _transfer(self, run: _Run) -> tuple[float, float]:
        group, attempt = run.lease()
        put = self._writer("put", group, attempt)
        got = self._reader("get", run.step, run.chunk)
        run.next_chunk()
        return put, got

    def stop(self) -> None:
        for worker in (self._writer, self._reader):
            worker.stop()


class _Run:
    """A run on the daemon and its log."""

    def __init__(self, daemon: QueueDaemon, name: str, case: Case, groups_open: int, per_step: int = 1) -> None:
        self.name, self.step, self.chunk = name, 0, 0
        self._case, self._groups_open, self._per_step = case, groups_open, per_step
        self._leases: list[tuple[str, int]] = []
        self._client, self._log = QueueClient(daemon.address, name, "grpc"), DcsLog()

    def __enter__(self) -> _Run:
        self._client.open_run(spec_of(self._case, self._groups_open, self._per_step), "bench", self._log.address)
        count = max(self._case.transfers, self._case.held) + 4 * self._per_step
        groups = [pb.PromptGroup(group=f"g{i}", position=i, prompt_json="1") for i in range(count)]
        self._client.offer_groups(groups, term=1)
        self._log.commit_and_serve("bench", 0)
        return self

    def lease(self) -> tuple[str, int]:
        """One group of the step; all of them are leased at once, as a rollout server does."""
        if not self._leases:
            granted = self._client.lease_groups("bench", 1, self._per_step, CALL_SECONDS)
            self._leases = [(lease.group.group, lease.attempt) for lease in granted]
        return self._leases.pop(0)

    def next_chunk(self) -> None:
        """The step is committed, and its rows are freed, after its last chunk."""
        self.chunk += 1
        if self.chunk < self._per_step:
            return
        close = self._client.get_plan("reader", 1, 0, self.step, self.chunk).close
        assert close is not None
        self.step, self.chunk = self.step + 1, 0
        self._log.commit_and_serve("bench", self.step, close.groups, close.plan_digest)

    def __exit__(self, *_: object) -> None:
        self._client.end()
        self._client.close()
        self._log.stop()


def memory_ratio(case: Case, transport: TransportName, progress: Callable[[str], None]) -> float:
    """Memory that a fresh daemon adds per byte of payload while it holds `held` batches."""
    progress(f"memory of case {case.name}, transport {transport}")
    with QueueDaemon() as daemon, _Run(daemon, "memory", case, groups_open=case.held + 1) as run:
        writer = Worker(daemon.address, transport)
        writer("run", "memory", case)
        leases = [run.lease() for _ in range(case.held)]
        before = daemon.memory_bytes()
        for group, attempt in leases:
            writer("put", group, attempt)
        added = daemon.memory_bytes() - before
        writer.stop()
    return added / (case.held * payload_bytes(case))


__all__ = ["CASES", "Bus", "memory_ratio"]
