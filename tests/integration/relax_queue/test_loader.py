"""The loader delivers a step's chunks in order, fetches one ahead, and delivers the same ones after any restart."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import DeadlineExceeded, PlanLost, Precondition
from relax_queue.client import Loaded, LoadedChunk, QueueClient, StepEnd, StreamingLoader, Wanted, ragged

IMAGE = pb.Field(name="image", dtype="float32", shape=[-1, 1024], scope=pb.SCOPE_ROW, writer="rollout")
IMAGE.bytes_max = 64 << 12


def begin(bench: Any, **changes: Any) -> list[Any]:
    """Four leased groups of a step that is planned in chunks of two for two ranks."""
    sizes = {"prompts_per_step": 4, "groups_per_chunk": 2, "data_parallel_size": 2, "max_staleness": 2}
    bench.begin(4, extra_fields=[IMAGE], **(sizes | changes))
    return list(bench.lease(4))


def put(bench: Any, lease: Any, seed: int) -> None:
    image = ragged("row", [np.full((20 + s, 1024), seed, np.float32) for s in range(2)])
    header = bench.header(lease, completes_group=pb.GROUP_OUTCOME_OK)
    assert bench.client.put(header, bench.columns(seed=seed) | {"image": image}) == "accepted"


def loader_of(client: QueueClient, dp_rank: int = 0) -> StreamingLoader:
    return StreamingLoader(client, Wanted("actor", dp_rank, ("tokens", "image"), ("reward",)), lambda: 1)


def all_of(loader: StreamingLoader, step: int = 0) -> list[Loaded]:
    loader.open(0, step)
    found = [loader.next(10)]
    while isinstance(found[-1], LoadedChunk):
        found.append(loader.next(10))
    return found


def read_to_the_end(loader: StreamingLoader) -> None:
    while isinstance(loader.next(10), LoadedChunk):
        pass


def content(found: list[Loaded]) -> list[Any]:
    return [
        (item.plan.generation, item.rows, item.everyone, {n: c.values.tobytes() for n, c in item.columns.items()},
         item.shared["reward"].values.tolist())
        if isinstance(item, LoadedChunk) else item.close
        for item in found
    ]  # fmt: skip


def test_I7_chunks_come_in_order_with_what_each_rank_needs_and_again_the_same(bench: Any) -> None:
    for i, lease in enumerate(begin(bench)):
        put(bench, lease, seed=i)
    ranks = [all_of(loader_of(bench.client, rank)) for rank in (0, 1)]
    for found in ranks:
        assert [type(item) for item in found] == [LoadedChunk, LoadedChunk, StepEnd]
    first, second = ranks[0][0], ranks[1][0]
    assert isinstance(first, LoadedChunk)
    assert isinstance(second, LoadedChunk)
    assert sorted(first.rows + second.rows) == sorted(first.everyone) == sorted(second.everyone)
    assert first.shared["reward"].values.tolist() == second.shared["reward"].values.tolist()
    for i, (group, sample, _) in enumerate(first.rows):
        assert first.columns["tokens"].unit(i)[0] == int(group[1]) + sample
    other = QueueClient(bench.queue.address, bench.run, "grpc")
    assert content(all_of(loader_of(other))) == content(ranks[0]), "another process over another transport"
    other.close()


def test_the_next_chunk_is_fetched_while_one_is_trained(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read = threading.Semaphore(0)
    inner: Callable[..., Any] = bench.client.read_rows

    def counted(*args: Any) -> Any:
        columns = inner(*args)
        read.release()
        return columns

    monkeypatch.setattr(bench.client, "read_rows", counted)
    leases = begin(bench, data_parallel_size=1)
    loader = loader_of(bench.client)
    loader.open(0, 0)
    with pytest.raises(DeadlineExceeded, match="of step 0"):
        loader.next(0.1)
    for i, lease in enumerate(leases):
        put(bench, lease, seed=i)
    assert read.acquire(timeout=10), "before anyone asks"
    chunk = loader.next(10)
    assert isinstance(chunk, LoadedChunk)
    assert read.acquire(timeout=10), "while the first one is trained"
    time.sleep(0.1)
    assert not read.acquire(blocking=False), "one ahead, not more"
    loader.close()


def test_rows_reach_torch_without_a_copy_and_cannot_be_written(bench: Any, transport_of: Any) -> None:
    assert bench.client.transport == "shm"
    for i, lease in enumerate(begin(bench, groups_per_chunk=1, data_parallel_size=1)):
        put(bench, lease, seed=i)
    loader = loader_of(bench.client)
    loader.open(0, 0)
    chunk = loader.next(10)
    assert isinstance(chunk, LoadedChunk)
    values = chunk.columns["image"].unit(0)
    assert not values.flags.writeable
    mapping = transport_of(bench.client).shared.mapping
    assert 0 <= values.ctypes.data - mapping._read_address < mapping._read.size(), "it lies in the queue's arena"
    with pytest.warns(UserWarning, match="not writable"):
        tensor = torch.from_numpy(values)
    assert tensor.data_ptr() == values.ctypes.data
    loader.close()


def test_the_stream_ends_when_a_sealed_run_is_drained(bench: Any) -> None:
    leases = begin(bench)
    bench.client.seal()
    for i, lease in enumerate(leases[:3]):
        put(bench, lease, seed=i)
    failed = bench.header(leases[3], samples=range(0), completes_group=pb.GROUP_OUTCOME_FAILED)
    bench.client.put(failed, {})
    loader = loader_of(bench.client)
    *_, end = all_of(loader)
    assert isinstance(end, StepEnd)
    assert end.close is not None
    assert (len(end.close.groups), end.close.short_reason) == (3, "run_ends")
    loader.open(0, 1)  # as a trainer does before it publishes
    bench.dcs.commit(1, end.close.groups, end.close.plan_digest)
    over = loader.next(10)
    assert isinstance(over, StepEnd)
    assert over.close is None


def test_I5_a_field_that_another_role_writes_late_is_named_and_then_delivered(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_queue.client.loader.READ_SECONDS", 0.3)
    late = pb.Field(name="ref_log_probs", dtype="float32", shape=[-1], scope=pb.SCOPE_ROW, writer="reference")
    bench.begin(2, extra_fields=[late])
    for lease in bench.lease(2):
        bench.complete(lease)
    loader = StreamingLoader(bench.client, Wanted("actor", 0, ("tokens", "ref_log_probs")), lambda: 1)
    loader.open(0, 0)
    with pytest.raises(DeadlineExceeded, match="field ref_log_probs of step 0: role reference writes it"):
        loader.next(1.0)
    answer = bench.client.get_plan("actor", 1, 0, 0, 0)
    assert answer.chunk is not None
    rows = [row for batch in answer.chunk.ranks[0] for row in batch.rows]
    bench.client.write_field("reference", 1, "ref_log_probs", rows, ragged("row", [np.ones(5, np.float32)] * 4))
    chunk = loader.next(10)
    assert isinstance(chunk, LoadedChunk)
    assert chunk.columns["ref_log_probs"].values.sum() == 20
    loader.close()


def test_I7_after_a_restart_the_queue_delivers_the_logged_chunks_and_tells_that_lost_ones_are_lost(own: Any) -> None:
    for i, lease in enumerate(begin(own, durability=pb.DURABILITY_FULL)):
        put(own, lease, seed=i)
    loader = loader_of(own.client)
    before = content(all_of(loader))
    loader.open(0, 0)
    first = loader.next(10)
    own.queue.kill()
    own.queue.start()
    rest = [loader.next(20), loader.next(20)]
    assert content([first, *rest]) == before, "a loader in mid-step goes on"
    assert content(all_of(loader_of(own.client))) == before


def test_a_lost_plan_is_raised_and_the_step_can_be_opened_again(own: Any) -> None:
    for i, lease in enumerate(begin(own)):
        put(own, lease, seed=i)
    loader = loader_of(own.client)
    loader.open(0, 0)
    assert isinstance(loader.next(10), LoadedChunk)
    own.queue.kill()
    own.queue.start()  # without its payload
    with pytest.raises(Precondition) as lost:
        read_to_the_end(loader)
    assert isinstance(lost.value, PlanLost)
    own.dcs.confirm("s", 1, 0)
    for i, lease in enumerate(own.lease(4)):
        put(own, lease, seed=i)
    again = all_of(loader)
    assert isinstance(again[0], LoadedChunk)
    assert again[0].plan.generation == 2
