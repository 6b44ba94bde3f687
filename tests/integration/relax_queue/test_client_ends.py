"""Calls of a client whose broker hangs or is killed, and of one that is closed or killed itself."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
import uvloop

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import DeadlineExceeded, RelaxError
from relax_common.rpc.portal import portal
from relax_queue.client import AioQueueClient, Column, QueueClient, ragged
from relax_queue.client.rows import put_shared
from relax_queue.rows.column_block import layout

PIXELS = pb.Field(name="pixels", dtype="float32", shape=[-1, 1176], scope=pb.SCOPE_ROW, writer="rollout")
PIXELS.bytes_max = 500 * 1176 * 4


def wait_until(ready: Callable[[], object], what: str, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"{what} never came"
        time.sleep(0.005)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def begun(call: Callable[[], Any]) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    made = pool.submit(call)
    pool.shutdown(wait=False)
    return made


def waits(bench: Any) -> list[str]:
    return [wait.who for wait in bench.client.status().waits]


def in_mid_plan(bench: Any, client: QueueClient, seconds: float) -> Future[Any]:
    call = begun(lambda: client.get_plan("actor", 1, 0, 0, 0, wait_seconds=seconds))
    wait_until(lambda: "GetPlan of actor" in waits(bench), "the wait")
    return call


def one_step(bench: Any, groups: int) -> None:
    leases = bench.lease(groups)
    assert [bench.complete(lease) for lease in leases] == ["accepted"] * groups
    assert bench.client.get_plan("actor", 1, 0, 0, 0).chunk is not None


def test_a_broker_that_stands_still_holds_no_caller_beyond_its_deadline(own: Any) -> None:
    own.begin()
    fresh = [QueueClient(own.queue.address, "run") for _ in range(2)]
    call = in_mid_plan(own, own.client, 1.0)
    os.kill(own.queue.pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        slow = begun(lambda: fresh[0].get_plan("actor", 1, 0, 0, 0, wait_seconds=1.0))
        time.sleep(0.05)  # it negotiates; another call that comes meanwhile must not wait longer than its own deadline
        quick = begun(lambda: fresh[0].get_plan("actor", 1, 0, 0, 0, wait_seconds=0.3))
        other = begun(lambda: fresh[1].get_plan("actor", 1, 0, 0, 0, wait_seconds=0.3))
        for waiting, seconds in ((quick, 0.35), (other, 0.3), (call, 1.0), (slow, 1.0)):
            with pytest.raises(DeadlineExceeded):
                waiting.result(20)
            assert time.monotonic() - begin < seconds + 0.4
    finally:
        os.kill(own.queue.pid, signal.SIGCONT)
    wait_until(lambda: waits(own) == [], "the end of the waits")
    one_step(own, 2)
    assert fresh[0].get_plan("actor", 1, 0, 0, 0).chunk is not None
    for client in fresh:
        client.close()


def test_a_call_in_progress_finds_the_broker_that_came_back_after_kill_9(own: Any) -> None:
    own.begin()
    call = in_mid_plan(own, own.client, 30.0)
    before = descriptors(os.getpid())
    own.queue.kill()
    own.queue.start()
    wait_until(lambda: "GetPlan of actor" in waits(own), "the repeated wait")
    own.dcs.confirm("s", 1, 0)
    leases = own.lease(2)
    assert [own.complete(lease) for lease in leases] == ["accepted"] * 2
    assert call.result(20).chunk is not None
    assert descriptors(os.getpid()) <= before + 2


CHILD = """
import sys, threading
from relax_queue.client import QueueClient
from relax.queue.v1 import queue_pb2 as pb
from relax_common.rpc.portal import portal
client = QueueClient(sys.argv[1], sys.argv[2], "shm")

async def lease():
    transport = await client.aio.connection.use(10)
    wanted = pb.GrantSlabRequest(session=transport.shared.session, size_bytes=1 << 20)
    await transport.stub.GrantSlab(wanted, timeout=10)

portal().call(lease())
for i in range(10):
    threading.Thread(target=client.get_plan, args=("actor", 1, 0, 0, 0), kwargs={"wait_seconds": 600}).start()
"""


def test_a_client_that_is_killed_in_mid_call_leaves_no_wait_and_no_descriptor(bench: Any) -> None:
    bench.begin()
    bench.client.transport  # noqa: B018
    before = descriptors(bench.queue.pid)
    child = subprocess.Popen([sys.executable, "-c", CHILD, bench.queue.address, bench.run])
    wait_until(lambda: waits(bench).count("GetPlan of actor") == 10, "the calls")
    child.kill()
    child.wait(10)
    wait_until(lambda: waits(bench) == [], "the end of the waits")
    wait_until(lambda: descriptors(bench.queue.pid) <= before + 1, "the end of the connections")
    one_step(bench, 2)


def test_a_client_that_closes_ends_its_calls_at_once_and_says_so(bench: Any) -> None:
    bench.begin()
    client = QueueClient(bench.queue.address, bench.run)
    call = in_mid_plan(bench, client, 30.0)
    begin = time.monotonic()
    client.close()
    with pytest.raises(RelaxError, match="the client of the queue is closed"):
        call.result(20)
    assert time.monotonic() - begin < 1.0
    wait_until(lambda: waits(bench) == [], "the end of the waits")


def test_slabs_to_give_back_are_named_again_when_the_call_that_named_them_failed(
    bench: Any, transport_of: Any, ask_on: Any
) -> None:
    bench.begin(extra_fields=[PIXELS])
    header, columns = ahead(bench, bench.lease()[0], 400)
    block = layout(columns)
    transport = transport_of(bench.client)

    def granted() -> pb.SlabGrant:
        wanted = pb.GrantSlabRequest(session=transport.shared.session, size_bytes=block.size)
        grant: pb.SlabGrant = ask_on(transport, "GrantSlab", wanted).grant
        return grant

    unused, spare = granted().slab, granted()
    transport.shared.forget(unused)
    for slabs in ([unused], [unused, spare.slab]):  # first no slab is granted; then one is at hand, but is not put
        with pytest.raises(grpc.RpcError, match="Deadline Exceeded"):
            portal().call(put_shared(transport, transport.shared, header, block, -1.0))
        named = transport.shared.unused()
        assert sorted(slab.offset for slab in named) == sorted(slab.offset for slab in slabs)
        transport.shared.forget(unused)
        transport.shared._keep(*transport.shared.granted(spare))


@contextmanager
def loop() -> Iterator[Callable[[Any], Future[Any]]]:
    made = uvloop.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield lambda work: asyncio.run_coroutine_threadsafe(work, made)
    made.call_soon_threadsafe(made.stop)
    thread.join(10)
    made.close()


def ahead(bench: Any, lease: Any, n_pixels: int) -> tuple[pb.PutHeader, dict[str, Column]]:
    """A put that has to wait for version 1."""
    pixels = ragged("row", [np.zeros((n_pixels, 1176), np.float32)] * 2)
    header = bench.header(lease, completes_group=pb.GROUP_OUTCOME_OK)
    return header, bench.columns(version=1) | {"pixels": pixels}


def test_puts_of_an_event_loop_end_with_its_client_and_with_an_error(bench: Any) -> None:
    bench.begin(extra_fields=[PIXELS], max_staleness=3)

    async def make() -> AioQueueClient:
        return AioQueueClient(bench.queue.address, bench.run)

    with loop() as run:
        client = run(make()).result(10)
        puts = [
            run(client.put(*ahead(bench, lease, n))) for lease, n in zip(bench.lease(3), (1, 100, 400), strict=True)
        ]
        wait_until(lambda: waits(bench).count("Put of s") == 3, "the waits")
        run(client.close()).result(10)
        for put in puts:
            with pytest.raises(RelaxError, match="the client of the queue is closed"):
                put.result(10)
        with pytest.raises(RelaxError, match="the client of the queue is closed"):
            run(client.put(*ahead(bench, bench.lease()[0], 1))).result(10)
    wait_until(lambda: waits(bench) == [], "the end of the waits")


@pytest.mark.parametrize("name", ["grpc", "shm", "auto"])
def test_a_transport_that_one_call_drops_still_carries_the_others(bench: Any, name: Any) -> None:
    bench.begin(extra_fields=[PIXELS], max_staleness=3)

    async def make() -> AioQueueClient:
        return AioQueueClient(bench.queue.address, bench.run, name)

    async def drop(client: AioQueueClient) -> None:
        dropped = await client.connection.use(5)
        client.connection.drop(dropped)
        await client.connection.done(dropped)

    bench.client.transport  # noqa: B018
    before = descriptors(bench.queue.pid)
    client = QueueClient(bench.queue.address, bench.run, name)
    sizes = (1, 400, 1, 400)
    leases = bench.lease(4)
    with loop() as run:
        aio = run(make()).result(10)
        puts = [run(aio.put(*ahead(bench, lease, n))) for lease, n in zip(leases[:2], sizes[:2], strict=True)]
        puts += [
            begun(lambda lease=lease, n=n: client.put(*ahead(bench, lease, n)))
            for lease, n in zip(leases[2:], sizes[2:], strict=True)
        ]
        wait_until(lambda: waits(bench).count("Put of s") == 4, "the waits")
        run(drop(aio)).result(10)
        portal().call(drop(client.aio))
        bench.dcs.commit(1)
        assert [put.result(10) for put in puts] == ["accepted"] * 4
        run(aio.close()).result(10)
    client.close()
    wait_until(lambda: descriptors(bench.queue.pid) <= before, "the end of the connections")
