"""All transports carry the same rows and refuse the same ones; what processes hold of shared memory ends with them."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import uvloop

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import AlreadyExists, DataLoss, InvalidInput, NotFound, Precondition, from_rpc
from relax_common.rpc.portal import portal
from relax_queue.client import AioQueueClient, Column, QueueClient, block_to, ragged
from relax_queue.rows.column_block import Layout, layout, take

SAMPLES = 8
PIXELS = pb.Field(name="pixels", dtype="float32", shape=[-1, 1176], scope=pb.SCOPE_ROW, writer="rollout")
PIXELS.bytes_max = 64 * 1176 * 4
POSITIONS_MAX = 5000
POSITIONS = pb.Field(name="positions", dtype="int64", shape=[3, -1], scope=pb.SCOPE_GROUP, writer="rollout")
POSITIONS.bytes_max = POSITIONS_MAX * 3 * 8
FIELDS = ["tokens", "pixels", "positions", "reward"]


NAMES = {"grpc": "grpc over a host socket", "shm": "shm", "auto": "grpc over a host socket"}


@pytest.fixture(scope="module")
def queue_without_arena(tmp_path_factory: pytest.TempPathFactory, make_queue: Any) -> Iterator[Any]:
    queue = make_queue(tmp_path_factory.mktemp("queue"))
    queue.start(RELAX_QUEUE__ARENA_BYTES="0")
    yield queue
    queue.stop()


@pytest.fixture(params=["grpc", "shm", "auto"])
def any_way(request: pytest.FixtureRequest, dcs: Any, make_bench: Any) -> Iterator[Any]:
    """If the queue has no arena, "auto" means gRPC."""
    queue = request.getfixturevalue("queue_without_arena" if request.param == "auto" else "shared_queue")
    bench = make_bench(queue, dcs, f"run-{time.monotonic_ns()}", request.param)
    assert bench.client.transport == NAMES[request.param]
    yield bench
    bench.client.close()


def begin(bench: Any, groups: int = 2, **changes: Any) -> None:
    bench.begin(
        groups, extra_fields=[PIXELS, POSITIONS], samples_per_prompt=SAMPLES, tokens_per_microbatch=10_000, **changes
    )


def columns(bench: Any, seed: int = 0) -> dict[str, Column]:
    """About 1.2 MB per group: more than fits into one message."""
    random = np.random.default_rng(seed)
    pixels = [random.standard_normal((20 + s, 1176), np.float32) for s in range(SAMPLES)]
    positions = random.integers(0, 1 << 40, (3, 9))
    return {
        **bench.columns(samples=SAMPLES, seed=seed),
        "pixels": ragged("row", pixels),
        "positions": ragged("group", [positions], transposed=True),
    }


def header(bench: Any, lease: Any) -> pb.PutHeader:
    made: pb.PutHeader = bench.header(lease, samples=range(SAMPLES), completes_group=pb.GROUP_OUTCOME_OK)
    return made


def planned(bench: Any) -> tuple[pb.PlanKey, list[Any]]:
    answer = bench.client.get_plan("actor", 1, 0, 0, 0)
    assert answer.chunk is not None
    return answer.plan, [row for batch in answer.chunk.ranks[0] for row in batch.rows]


def same(got: Column, i: int, sent: Column, j: int) -> bool:
    return got.unit(i).tobytes() == sent.unit(j).tobytes() and got.unit(i).shape == sent.unit(j).shape


def test_ragged_group_fields_images_and_a_shared_blob_come_back_as_they_went(any_way: Any) -> None:
    blob = np.random.default_rng(1).bytes(3 << 20)
    any_way.open(extra_fields=[PIXELS, POSITIONS], samples_per_prompt=SAMPLES, tokens_per_microbatch=10_000)
    any_way.offer(2, blobs=[any_way.client.put_blob(blob)])
    any_way.dcs.commit(0)
    any_way.dcs.confirm("s", 1, 0)
    sent = {}
    for i, lease in enumerate(any_way.lease(2)):
        assert any_way.client.get_blob(lease.group.blobs[0]) == blob
        sent[lease.group.group] = columns(any_way, seed=i)
        assert any_way.client.put(header(any_way, lease), sent[lease.group.group]) == "accepted"
    plan, rows = planned(any_way)
    orders = {
        "as planned": rows,
        "one group": [r for r in rows if r[0] == "g1"],
        "mixed": sorted(rows, key=lambda r: r[1]),
    }
    for name, wanted in orders.items():
        got = any_way.client.read_rows(plan, wanted, FIELDS)
        for i, (group, sample, _) in enumerate(wanted):
            assert same(got["tokens"], i, sent[group]["tokens"], sample), name
            assert same(got["pixels"], i, sent[group]["pixels"], sample), name
            assert got["reward"].unit(i) == sample, name
        for i, group in enumerate(dict.fromkeys(key[0] for key in wanted)):
            assert same(got["positions"], i, sent[group]["positions"], 0), name
        assert got["positions"].unit(0).shape == (3, 9)
        assert not any(column.values.flags.writeable for column in got.values() if name == "one group")
    assert any_way.client.status().bytes_held < 1.1 * sum(layout(c).size for c in sent.values())
    with pytest.raises(NotFound, match="is not stored"):
        any_way.client.get_blob("0" * 32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pixels": ragged("row", [np.zeros((20, 1176))] * SAMPLES)}, "field pixels: dtype float64 came"),
        ({"pixels": ragged("row", [np.zeros((20, 1175), np.float32)] * SAMPLES)}, r"entries of shape \[1175\] came"),
        ({"pixels": Column("row", np.zeros((SAMPLES, 9, 1176), np.float32))}, "field pixels: ragged or not"),
        ({"pixels": ragged("row", [np.zeros((65, 1176), np.float32)] * SAMPLES)}, "a value has 305760 bytes"),
        ({"pixels": ragged("row", [np.zeros((20, 1176), np.float32)] * 7)}, "7 values came for 8 units"),
        ({"positions": ragged("group", [np.zeros((9, 3), np.int64)])}, "field positions: ragged or not"),
        ({"nonsense": Column("sample", np.zeros(SAMPLES, np.float32))}, "field nonsense is not in the schema"),
        ({"pixels": None}, "field pixels is missing"),
        ("offsets", "offsets must begin with 0"),
        ("bytes", "a group may hold"),
        ("checksum", "checksum|do not run"),
        ("lease", "is gone"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_refused_stores_nothing_and_leaves_the_way_usable(any_way: Any, change: Any, said: str) -> None:
    begin(any_way, groups=1)
    (lease,) = any_way.lease()
    good, wrong = columns(any_way), header(any_way, lease)
    sent = dict(good)
    if isinstance(change, dict):
        sent = {k: v for k, v in (good | change).items() if v is not None}
    elif change == "bytes":
        sent["pixels"] = Column("row", np.zeros((2000, 1176), np.float32))
    elif change == "lease":
        wrong.lease.attempt = 9
    damaged = change in ("offsets", "checksum")
    put = (lambda: put_damaged(any_way, wrong, sent, change)) if damaged else (lambda: any_way.client.put(wrong, sent))
    with pytest.raises((InvalidInput, NotFound, Precondition), match=said):
        put()
    status = any_way.client.status()
    assert (status.bytes_held, status.counts.leased) == (0, 1)
    assert any_way.client.put(header(any_way, lease), columns(any_way)) == "accepted"


class Damaged(Layout):
    """The digest of other bytes."""

    def buffers(self) -> list[memoryview]:
        head, *body = super().buffers()
        return [memoryview(bytes(head[:16]) + bytes(8) + bytes(head[24:])), *body]

    def write(self, target: memoryview) -> int:
        return super().write(target) ^ 1


def put_damaged(bench: Any, wrong: pb.PutHeader, sent: dict[str, Column], flaw: str) -> None:
    """What arrives from a faulty sender or over a connection that loses bytes."""
    block = layout(sent)
    if flaw == "checksum":
        block = Damaged(block.head, block.body, block.size)
    else:
        offsets = sent["pixels"].offsets
        assert offsets is not None
        offsets[1], offsets[2] = offsets[2], offsets[1]  # a layout refers to the arrays: changed values are hashed
    wrong.size_bytes = block.size
    portal().call(bench.client.aio.rows.put(wrong, block))


def test_a_lost_answer_is_repeated_and_changed_content_is_refused(any_way: Any) -> None:
    begin(any_way, groups=2)
    (lease,) = any_way.lease()
    sent = columns(any_way)
    assert any_way.client.put(header(any_way, lease), sent) == "accepted"
    held = any_way.client.status().bytes_held
    any_way.client.register_term("s", 2)
    assert any_way.client.put(header(any_way, lease), sent) == "accepted", "the stored answer, not STALE_TERM"
    with pytest.raises(AlreadyExists):
        any_way.client.put(header(any_way, lease), columns(any_way, seed=1))
    assert any_way.client.status().bytes_held == held
    other: QueueClient = type(any_way.client)(any_way.queue.address, any_way.run, "auto")
    assert other.put(header(any_way, lease), sent) == "accepted", "the same content over another transport"
    other.close()


def test_a_group_larger_than_its_reservation_is_refused_whole(any_way: Any) -> None:
    begin(any_way, groups=1)
    (lease,) = any_way.lease()
    everything = columns(any_way) | {
        "pixels": ragged("row", [np.zeros((64, 1176), np.float32)] * SAMPLES),
        "positions": ragged("group", [np.zeros((3, POSITIONS_MAX), np.int64)], transposed=True),
    }
    halves = []
    for samples in (range(4), range(4, 8)):
        part = header(any_way, lease)
        part.completes_group = pb.GROUP_OUTCOME_UNSPECIFIED
        part.rows.CopyFrom(block_to([(lease.group.group, s, 0) for s in samples]))
        halves.append((part, {n: c if c.scope == "group" else take(c, samples) for n, c in everything.items()}))
    assert any_way.client.put(*halves[0]) == "accepted"
    with pytest.raises(InvalidInput, match=r"would hold .* its lease reserved") as refused:
        any_way.client.put(*halves[1])
    assert refused.value.reason == "OVERSIZE"
    assert any_way.client.status().bytes_held == layout(halves[0][1]).size
    without = {n: c for n, c in halves[1][1].items() if n != "positions"}
    assert any_way.client.put(halves[1][0], without) == "accepted"


CHILD = """
import sys, time
from relax.common.v1 import common_pb2
from relax.queue.v1 import queue_pb2 as pb
from relax_queue.client import QueueClient
from relax_common.rpc.portal import portal
from relax_queue.transport.frames import REQUEST_CHUNK, frames

async def ask(method, request):
    return await method(request, timeout=600)

address, run, what = sys.argv[1:]
client = QueueClient(address, run, "shm")
if what == "read":
    answer = client.get_plan("actor", 1, 0, 0, 0)
    rows = [row for batch in answer.chunk.ranks[0] for row in batch.rows if row[0] == "g0"]
    held = client.read_rows(answer.plan, rows, ["pixels"])["pixels"]
    print("holds", held.values.nbytes, flush=True)
elif what == "stream":
    transport = portal().call(client.aio.connection.use(10))
    header = pb.PutHeader(run=run, server="s", term=1, lease=pb.LeaseKey(group="g0", attempt=1), size_bytes=2 << 20)

    def half_a_put():
        yield pb.PutRequest(header=header).SerializeToString()
        yield from frames([bytes(1 << 20)], REQUEST_CHUNK)
        print("holds", 1 << 20, flush=True)
        time.sleep(600)

    portal().call(ask(transport.put_frames, half_a_put()))
else:
    transport = portal().call(client.aio.connection.use(10))
    wanted = pb.GrantSlabRequest(session=transport.shared.session, size_bytes=int(what))
    grant = portal().call(ask(transport.stub.GrantSlab, wanted)).grant
    transport.shared.mapping.writable(grant.slab, 1000)[:] = bytes(1000)
    print("holds", grant.slab.size_bytes, flush=True)
time.sleep(600)
"""


class Child:
    """Another process of this host with shared memory of the queue."""

    def __init__(self, bench: Any, what: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, bench.queue.address, bench.run, what], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("holds")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


def arena_used(queue: Any) -> int:
    with urllib.request.urlopen(f"http://{queue.metrics_address}/metrics", timeout=5) as page:
        found = re.search(r"^relax_queue_arena_used_bytes (\S+)", page.read().decode(), re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def wait_until(ready: Any, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


@pytest.fixture
def small(tmp_path: Path, dcs: Any, make_bench: Any, make_queue: Any) -> Iterator[Any]:
    """A queue of its own whose arena is one piece of 16 MiB."""
    queue = make_queue(tmp_path)
    queue.start(RELAX_QUEUE__ARENA_BYTES=str(16 << 20))
    bench = make_bench(queue, dcs, "run", "shm")
    yield bench
    bench.client.close()
    queue.stop()


def test_shared_memory_comes_back_from_the_dead_and_a_full_arena_falls_back_to_grpc(small: Any) -> None:
    begin(small, groups=4, max_staleness=3)
    leases = small.lease(4)
    assert small.client.transport == "shm"
    before = arena_used(small.queue)
    writer = Child(small, str(9 << 20))
    assert arena_used(small.queue) >= before + (9 << 20), "a slab is granted to a producer"
    blocker = Child(small, str(13 << 19))
    full = arena_used(small.queue)
    for lease in leases[:2]:
        assert small.client.put(header(small, lease), columns(small)) == "accepted", "rows lie on the heap"
    assert arena_used(small.queue) == full
    writer.kill()
    blocker.kill()
    wait_until(lambda: arena_used(small.queue) == before)
    plan, rows = planned(small)
    got = small.client.read_rows(plan, rows, FIELDS)
    assert same(got["pixels"], 0, columns(small)["pixels"], rows[0][1])
    for lease in leases[2:]:
        assert small.client.put(header(small, lease), columns(small)) == "accepted"
    assert arena_used(small.queue) > before, "there is room again"


def test_a_producer_that_dies_in_mid_put_leaves_nothing_and_its_group_to_others(small: Any) -> None:
    begin(small, groups=1)
    (lease,) = small.lease()
    assert small.client.transport == "shm"
    before = arena_used(small.queue)
    producer = Child(small, "stream")
    wait_until(lambda: arena_used(small.queue) >= before + (2 << 20))
    producer.kill()
    wait_until(lambda: arena_used(small.queue) == before)
    status = small.client.status()
    assert (status.bytes_held, status.counts.leased) == (0, 1)
    assert small.client.put(header(small, lease), columns(small)) == "accepted"


def test_an_event_loop_puts_many_groups_over_the_same_transports(any_way: Any) -> None:
    begin(any_way, groups=6)
    leases = any_way.lease(2)
    returned = any_way.header(leases[1], samples=range(SAMPLES))
    large, transport = (
        columns(any_way),
        next(transport for transport, name in NAMES.items() if name == any_way.client.transport),
    )
    small = large | {"pixels": ragged("row", [np.zeros((1, 1176), np.float32)] * SAMPLES)}
    sent = {"g0": large, "g1": small}

    async def work() -> list[str]:
        client = AioQueueClient(any_way.queue.address, any_way.run, transport)
        await client.return_group(returned, large)
        again = [lease async for lease in client.lease_groups("s", 1, 1, 5.0)]
        puts = (client.put(header(any_way, lease), sent[lease.group.group]) for lease in (leases[0], *again))
        made = await asyncio.gather(*puts)
        await client.close()
        return made

    assert uvloop.run(work()) == ["accepted", "accepted"], "on the event loop that daemons have"
    plan, rows = planned(any_way)
    got = any_way.client.read_rows(plan, rows, FIELDS)
    assert all(same(got["pixels"], i, sent[group]["pixels"], sample) for i, (group, sample, _) in enumerate(rows))


def test_rows_are_not_overwritten_while_a_reader_holds_views_and_a_killed_reader_holds_none(small: Any) -> None:
    begin(small, groups=4, max_staleness=3)
    for i, lease in enumerate(small.lease(2)):
        small.client.put(header(small, lease), columns(small, seed=i))
    plan, rows = planned(small)
    reader = Child(small, "read")
    held = small.client.read_rows(plan, [r for r in rows if r[0] == "g1"], ["pixels"])["pixels"]
    copy = held.values.copy()
    closing = small.client.get_plan("actor", 1, 0, 0, 1).close
    small.dcs.commit(1, closing.groups, closing.plan_digest)
    small.dcs.snapshot(1)
    wait_until(lambda: small.client.status().bytes_held == 0)
    with pytest.raises(Precondition):
        small.client.read_rows(plan, rows, ["pixels"])
    used, size = arena_used(small.queue), held.values.nbytes
    assert used > 2 * size, "both groups are freed, and both are still looked at"
    reader.kill()
    wait_until(lambda: arena_used(small.queue) < used - size)
    small.dcs.confirm("s", 1, 1)
    for i, lease in enumerate(small.lease(2)):
        small.client.put(header(small, lease), columns(small, seed=7 + i) | small.columns(SAMPLES, version=1))
    assert (held.values == copy).all()
    used = arena_used(small.queue)
    del held
    gc.collect()
    plan, rows = planned_of(small, 1)
    small.client.read_rows(plan, rows, ["pixels"])
    assert arena_used(small.queue) < used, "the broker hears of closed views with the next read"


def planned_of(bench: Any, step: int) -> tuple[pb.PlanKey, list[Any]]:
    answer = bench.client.get_plan("actor", 1, 0, step, 0)
    assert answer.chunk is not None
    return answer.plan, [row for batch in answer.chunk.ranks[0] for row in batch.rows]


def test_a_slab_that_was_reused_is_noticed_and_one_of_another_session_is_refused(
    small: Any, transport_of: Any, ask_on: Any
) -> None:
    begin(small, groups=1)
    (lease,) = small.lease()
    transport = transport_of(small.client)
    wanted = pb.GrantSlabRequest(session=transport.shared.session, size_bytes=1 << 20)
    grant = ask_on(transport, "GrantSlab", wanted).grant
    stale = pb.SlabKey(offset=grant.slab.offset, generation=grant.slab.generation + 1, size_bytes=1 << 20)
    with pytest.raises(DataLoss, match="was to be read"):
        transport.shared.mapping.readable(stale, lambda offset: None)
    wrong = header(small, lease)
    wrong.size_bytes = 1000
    request = pb.PutGroupsRequest(session=transport.shared.session, puts=[pb.GroupPut(header=wrong, slab=stale)])
    assert ask_on(transport, "PutGroups", request).results[0].refusal.reason == "SLAB_GONE"
    request.session += 1
    with pytest.raises(grpc.RpcError) as unknown:
        ask_on(transport, "PutGroups", request)
    assert from_rpc(unknown.value).reason == "UNKNOWN_SESSION"
    assert small.client.status().bytes_held == 0
    writable = memoryview(transport.shared.mapping.readable(grant.slab, lambda offset: None))
    assert writable.readonly


def test_a_restarted_queue_is_attached_to_again(small: Any) -> None:
    begin(small, groups=2)
    first, second = small.lease(2)
    assert small.client.put(header(small, first), columns(small)) == "accepted"
    small.queue.kill()
    small.queue.start()
    small.dcs.confirm("s", 1, 0)
    assert small.client.put(header(small, second), columns(small)) == "accepted"
    assert small.client.transport == "shm"
    (again,) = small.lease()
    assert small.client.put(header(small, again), columns(small)) == "accepted"


def test_I5_a_wait_of_one_put_holds_up_no_other(any_way: Any) -> None:
    begin(any_way, groups=2)
    ahead, now = any_way.lease(2)
    waiting = threading.Thread(
        target=lambda: any_way.client.put(
            header(any_way, ahead), columns(any_way) | any_way.columns(SAMPLES, version=1)
        )
    )
    waiting.start()
    wait_until(lambda: [w.what for w in any_way.client.status().waits if w.who == "Put of s"])
    assert any_way.client.put(header(any_way, now), columns(any_way)) == "accepted"
    any_way.dcs.commit(1)
    waiting.join(10)
    assert not waiting.is_alive()
