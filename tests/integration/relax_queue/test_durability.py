"""What a killed queue still knows: everything with durability `full`; on a full disk, what it had answered."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import Exhausted, Precondition
from relax_queue.client import ragged
from relaxd.run.ledger import Ledger


def wait_for(ready: Any, seconds: float = 10.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := ready()):
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.005)
    return value


def restart(bench: Any, **environment: str) -> None:
    bench.queue.kill()
    bench.queue.start(**environment)
    bench.client.status()


def ledger_of(bench: Any) -> Ledger:
    ledger = Ledger()
    bench.client.status()  # answered once a restarted queue has read its log
    for e in bench.events():
        about = {"source": "queue", "revision": e.revision, "kind": e.kind, "group": e.group}
        ledger.apply(json.loads(e.detail_json) | about)
    assert ledger.faults == []
    return ledger


def rows_of(answer: Any) -> list[Any]:
    return [row for rank in answer.chunk.ranks for batch in rank for row in batch.rows]


def test_I1_I7_with_full_durability_a_kill_regenerates_nothing_and_keeps_the_plan(own: Any) -> None:
    extra = pb.Field(name="ref_log_probs", dtype="float32", shape=[-1], scope=pb.SCOPE_ROW, writer="reference")
    own.begin(groups=6, durability=pb.DURABILITY_FULL, groups_per_chunk=1, extra_fields=[extra])
    leases = own.lease(4)
    for i, lease in enumerate(leases[:2]):
        assert own.complete(lease, seed=10 * i) == "accepted"
    own.client.put(own.header(leases[2], samples=range(1)), own.columns(samples=1, seed=7))
    plan = own.client.get_plan("actor", 1, 0, 0, 0)
    rows = rows_of(plan)
    own.client.write_field("reference", 1, "ref_log_probs", rows, ragged("row", [np.full(5, 2.5, np.float32)] * 2))
    fields = ["tokens", "log_probs", "reward", "ref_log_probs"]
    before = own.client.read_rows(plan.plan, rows, fields)
    close = own.client.get_plan("actor", 1, 0, 0, 2).close
    restart(own)
    again = own.client.get_plan("actor", 1, 0, 0, 0, generation=plan.plan.generation)
    assert (again.chunk, own.client.get_plan("actor", 1, 0, 0, 2).close) == (plan.chunk, close)
    after = own.client.read_rows(plan.plan, rows, fields)
    for name, column in before.items():
        assert column.values.tobytes() == after[name].values.tobytes()
    assert own.complete(leases[0], seed=0) == "accepted", "the stored answer of a repeated put"
    header = own.header(leases[2], samples=range(1, 2), completes_group=pb.GROUP_OUTCOME_OK)
    assert own.client.put(header, own.columns(samples=1)) == "accepted", "its complete sample is still here"
    own.dcs.commit(1, close.groups, close.plan_digest)
    wait_for(lambda: own.client.status().counts.trained == 2)
    restart(own)
    replay = own.client.get_plan("actor", 1, 0, 0, 0)
    assert replay.chunk == plan.chunk, "rows of a committed step are kept for a replay"
    assert own.client.read_rows(replay.plan, rows, ["tokens"])["tokens"].units == 2
    own.dcs.snapshot(1)
    wait_for(lambda: [p.name for p in own.client.partitions()] == ["train/1"])
    ledger = ledger_of(own)
    assert ledger.leases_lost == 0
    assert not any(e.kind in ("sent_back", "plan_lost", "lease_lost") for e in own.events())
    counts = own.client.end()
    assert (counts.trained, counts.returned) == (2, 4)
    assert own.client.status().payload_disk_bytes < 10_000


@pytest.mark.parametrize("point", ["queue.payload_half_written", "queue.snapshot_before_compaction"])
def test_I1_a_queue_killed_while_it_writes_payload_or_a_snapshot_goes_on(own: Any, tmp_path: Path, point: str) -> None:
    small = {"RELAX_QUEUE__SEGMENT_BYTES": "3000", "RELAX_FAILPOINTS_DIR": str(tmp_path)}
    own.begin(groups=12, durability=pb.DURABILITY_FULL)
    wait_for(lambda: own.client.status().confirmed)
    restart(own, RELAX_FAILPOINTS=f"{point}=kill@2", **small)
    watcher = Thread(target=lambda: (own.queue.wait(), own.queue.start(**small)))
    watcher.start()
    for step in range(3):
        for lease in own.lease(2):
            assert own.complete(lease, version=step) == "accepted"
        close = own.client.get_plan("actor", 1, 0, step, 1).close
        own.dcs.commit(step + 1, close.groups, close.plan_digest)
        own.dcs.confirm("s", 1, step + 1)
        own.dcs.snapshot(step + 1)
        wait_for(lambda step=step: own.client.status().counts.trained == 2 * (step + 1))
    watcher.join(10)
    assert (tmp_path / f"{point}.fired").exists()
    assert sorted(ledger_of(own).groups_in("trained")) == [f"g{i}" for i in range(6)]


@pytest.fixture
def small_disk(tmp_path: Path, dcs: Any, bench_class: Any) -> Iterator[Any]:
    """A queue whose state directory is a file system of its own with 24 MB."""
    bench = bench_class(tmp_path, dcs, ("unshare", "-rm", "sh", "-c", MOUNT, str(tmp_path / "state")))
    yield bench
    bench.client.close()
    bench.queue.stop()


MOUNT = 'mkdir -p "$0" && mount -t tmpfs -o size=24m tmpfs "$0" && exec "$@"'


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(1 << 16))
            except OSError:
                return


def test_a_full_disk_refuses_puts_and_leases_and_the_queue_goes_on_when_there_is_room(small_disk: Any) -> None:
    own = small_disk
    own.begin(groups=6, durability=pb.DURABILITY_FULL)
    leases = own.lease(2)
    filler = Path(f"/proc/{own.queue.pid}/root{own.queue.state_dir}/filler")
    fill(filler)
    with pytest.raises(Exhausted, match=r"the disk below .*/state/runs/run has \d+ bytes free, \d+ are needed") as full:
        own.complete(leases[0])
    assert full.value.reason == "DISK_FULL"
    assert full.value.details["path"].endswith("/state/runs/run")
    with pytest.raises(Exhausted):
        own.lease(1)
    with pytest.raises(Exhausted):
        own.offer(1, first=9)
    own.client.register_term("actor", 2)  # calls that must succeed may use the last bytes
    status = own.client.status()
    assert (status.bytes_held, status.counts.leased, status.counts.offered) == (0, 2, 6)
    filler.unlink()
    for lease in leases:
        assert own.complete(lease) == "accepted"
    close = own.client.get_plan("actor", 2, 0, 0, 1).close
    own.dcs.commit(1, close.groups, close.plan_digest)
    wait_for(lambda: own.client.status().counts.trained == 2)
    ledger_of(own)


def test_I5_a_step_closes_at_its_deadline_and_a_holder_that_sleeps_past_its_lease_is_told(bench: Any) -> None:
    bench.begin(
        groups=4, closing=pb.CLOSING_MIN_N, closing_min_prompts=1, closing_deadline_seconds=0.8, max_staleness=2,
        lease_ttl_seconds=1.5, lease_attempts_max=1,
    )  # fmt: skip
    first, sleeper = bench.lease(2)
    bench.complete(first)
    began = time.monotonic()
    close = bench.client.get_plan("actor", 1, 0, 0, 1).close
    assert time.monotonic() - began < 1.4
    assert (close.groups, close.short_reason) == (("g0",), "closing_deadline")
    assert bench.client.status().oldest_lease_seconds > 0.5
    wait_for(lambda: bench.client.status().counts.dropped.get("quarantined") == 1)
    with pytest.raises(Precondition) as gone:
        bench.complete(sleeper)
    assert gone.value.reason == "LEASE_GONE"
    assert bench.client.renew_leases("s", 1, [("g1", 1)]) == [("g1", 1)]
    inspected = bench.client.inspect("g1")
    assert inspected.reason == "quarantined: 1 leases were lost, the last at server s: lease_expired"
