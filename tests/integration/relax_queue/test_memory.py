"""I4 for incoming calls: memory is taken as bytes arrive and freed at once; what exceeds the budget is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import xxhash

from relax.queue.v1 import queue_pb2 as pb
from relax.queue.v1 import queue_pb2_grpc
from relax_common.errors import RelaxError, from_rpc
from relax_common.rpc.channels import sync_channel
from relax_queue.client import ragged

MIB = 1 << 20
BUDGET = 512 * MIB
CALLS = 4
WIDE = pb.Field(name="wide", dtype="uint8", shape=[-1], scope=pb.SCOPE_ROW, writer="critic", bytes_max=36 * MIB)
BODY = pb.Field(name="body", dtype="uint8", shape=[-1], scope=pb.SCOPE_ROW, writer="rollout", bytes_max=8 * MIB)


def wait_until(ready: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"{what} never came"
        time.sleep(0.02)


class Hostile:
    """Streams that send a header and this many bytes, and keep the call open until they are told to end."""

    def __init__(self, bench: Any, kind: str, size_bytes: int, sent_bytes: int) -> None:
        self._channels = [sync_channel(bench.queue.address) for _ in range(CALLS)]
        self._let_go = threading.Event()
        self._pool = ThreadPoolExecutor(CALLS)
        self.sent = [0] * CALLS
        self.calls = [self._pool.submit(self._call, i, bench, kind, size_bytes, sent_bytes) for i in range(CALLS)]

    def _frames(self, i: int, bench: Any, kind: str, size_bytes: int, sent_bytes: int) -> Iterator[Any]:
        run = bench.run
        if kind == "WriteField":
            header: Any = pb.WriteFieldHeader(run=run, role="critic", term=1, field="wide", size_bytes=size_bytes)
            make = pb.WriteFieldRequest
        elif kind == "PutBlob":
            header, make = pb.BlobHeader(run=run, hash=f"{i:032x}", size_bytes=size_bytes), pb.PutBlobRequest
        else:
            lease = pb.LeaseKey(group="g0", attempt=1)
            header, make = pb.PutHeader(run=run, server="s", term=1, lease=lease, size_bytes=size_bytes), pb.PutRequest
        yield make(header=header)
        while self.sent[i] < sent_bytes:
            yield make(chunk=bytes(2 * MIB))
            self.sent[i] += 2 * MIB
        self._let_go.wait(60)

    def _call(self, i: int, *what: Any) -> RelaxError | None:
        stub = queue_pb2_grpc.QueueServiceStub(self._channels[i])
        try:
            getattr(stub, what[1])(self._frames(i, *what), timeout=120.0)
        except grpc.RpcError as error:
            return from_rpc(error)
        return None

    def let_go(self) -> list[RelaxError | None]:
        self._let_go.set()
        ends = [call.result(60) for call in self.calls]
        self._pool.shutdown()
        for channel in self._channels:
            channel.close()
        return ends


@pytest.fixture
def small(tmp_path: Path, dcs: Any, make_bench: Any, make_queue: Any) -> Iterator[Any]:
    queue = make_queue(tmp_path)
    queue.start()
    bench = make_bench(queue, dcs, "run")
    bench.begin(
        2, extra_fields=[WIDE, BODY], max_staleness=0, memory_budget_bytes=BUDGET, samples_per_prompt=2,
        prompts_per_step=1, groups_per_chunk=1,
    )  # fmt: skip
    yield bench
    bench.client.close()
    queue.stop()


def payload_bytes(pid: int) -> int:
    """Memory that a broker has taken for payload: its mappings, and what its allocator holds."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssShmem:")[1].split()[0]) * 1024


def answers_quickly(bench: Any) -> None:
    begin = time.monotonic()
    assert bench.client.status().bytes_budget == BUDGET
    assert time.monotonic() - begin < 10.0, "also on a machine with other work to do"


@pytest.mark.parametrize(
    ("kind", "size_bytes"), [("WriteField", 160 * MIB), ("PutBlob", 1000 * MIB), ("Put", 30 * MIB)]
)
def test_I4_a_header_takes_no_memory_before_its_bytes_come(small: Any, kind: str, size_bytes: int) -> None:
    process = psutil.Process(small.queue.pid)
    before = process.memory_info().rss
    hostile = Hostile(small, kind, size_bytes, 2 * MIB)
    wait_until(lambda: min(hostile.sent) >= 2 * MIB, "the first bytes")
    answers_quickly(small)
    time.sleep(0.2)
    taken = process.memory_info().rss - before
    assert taken < CALLS * 16 * MIB, "a few MiB each, not what they declare"
    assert process.memory_info().rss < 1.3 * BUDGET
    assert all(end is not None and "bytes arrived" in end.message for end in hostile.let_go())
    assert small.client.status().bytes_held == 0


@pytest.mark.parametrize(("kind", "size_bytes"), [("WriteField", 160 * MIB), ("PutBlob", 1000 * MIB)])
def test_I4_the_broker_stays_within_its_budget_and_gives_back_at_once(small: Any, kind: str, size_bytes: int) -> None:
    most, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            most[0] = max(most[0], payload_bytes(small.queue.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    hostile = Hostile(small, kind, size_bytes, size_bytes - 2 * MIB)
    wait_until(lambda: sum(call.done() for call in hostile.calls) >= 1, "the refusals", 60.0)
    answers_quickly(small)
    ends = hostile.let_go()
    stop.set()
    watcher.join()
    refused = [end for end in ends if end is not None and end.reason == "BUDGET"]
    assert len(refused) >= 1
    assert "memory_budget_bytes" in refused[0].message
    assert BUDGET // 2 < most[0] < 1.05 * BUDGET, "what gRPC receives ahead of its reader comes on top"
    wait_until(lambda: payload_bytes(small.queue.pid) < 64 * MIB, "the memory of all calls")
    # The memory of refused calls is free again: there is room for a whole group of rows.
    lease = small.lease()[0]
    body = ragged("row", [np.ones(7 * MIB, np.uint8)] * 2)
    header = small.header(lease, completes_group=pb.GROUP_OUTCOME_OK)
    assert small.client.put(header, small.columns() | {"body": body}) == "accepted"


def test_a_blob_that_fits_is_stored_while_others_only_announce_theirs(small: Any) -> None:
    hostile = Hostile(small, "PutBlob", 1000 * MIB, 2 * MIB)
    wait_until(lambda: min(hostile.sent) >= 2 * MIB, "the first bytes")
    content = b"image" * MIB
    assert small.client.put_blob(content) == xxhash.xxh3_128_hexdigest(content)
    hostile.let_go()
