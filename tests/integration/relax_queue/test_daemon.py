"""The queue daemon over its wire: one step of a run, bad input, waits."""

import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import AlreadyExists, DeadlineExceeded, InvalidInput, NotFound, Precondition, RelaxError
from relax_common.rpc.portal import portal
from relax_queue.client import Column, ragged


def wait_for(ready: Any, seconds: float = 5.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := ready()):
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.005)
    return value


def test_a_step_goes_from_offer_to_trained(bench: Any) -> None:
    bench.begin()
    leases = bench.lease(credits=2)
    assert [lease.group.group for lease in leases] == ["g0", "g1"]
    assert [bench.complete(lease, seed=i) for i, lease in enumerate(leases)] == ["accepted", "accepted"]
    answer = bench.client.get_plan("actor", 1, 0, 0, 0)
    assert answer.chunk is not None
    assert answer.chunk.groups == ("g0", "g1")
    rows = [row for batch in answer.chunk.ranks[0] for row in batch.rows]
    columns = bench.client.read_rows(answer.plan, rows, ["tokens", "reward"])
    for i, (group, sample, _) in enumerate(rows):
        assert columns["tokens"].unit(i).tolist() == (np.arange(5) + int(group[1]) + sample).tolist()
    closing = bench.client.get_plan("actor", 1, 0, 0, 1).close
    assert closing is not None
    assert (closing.n_tokens, closing.n_samples) == (12, 4)
    bench.dcs.commit(1, closing.groups, closing.plan_digest)
    assert wait_for(lambda: bench.client.status().counts.trained) == 2
    assert [p.name for p in bench.client.partitions()] == ["train/0"]
    assert bench.client.read_rows(answer.plan, rows, ["tokens"])["tokens"].units == 4, "kept for a replay"
    bench.dcs.snapshot(1)
    wait_for(lambda: not bench.client.partitions())
    with pytest.raises(Precondition) as freed:
        bench.client.read_rows(answer.plan, rows, ["tokens"])
    assert freed.value.reason == "ROWS_FREED"
    bench.client.seal()
    counts = bench.client.end()
    assert (counts.trained, counts.returned, counts.offered) == (2, 2, 4)
    kinds = [(e.kind, e.group) for e in bench.events() if e.group]
    assert kinds[:4] == [("offered", f"g{i}") for i in range(4)]
    assert kinds[4:] == [
        *(("leased", f"g{i}") for i in range(2)),
        *(("completed", f"g{i}") for i in range(2)),
        *(("planned", f"g{i}") for i in range(2)),
        *(("trained", f"g{i}") for i in range(2)),
        *(("returned", f"g{i}") for i in (2, 3)),
    ]


def test_I5_a_wait_wakes_at_once_and_its_deadline_names_what_is_missing(bench: Any) -> None:
    bench.begin(groups=2)
    with pytest.raises(DeadlineExceeded, match=r"groups of step 0: 0 planned and 0 ready of 2.*2 pending"):
        bench.client.get_plan("actor", 1, 0, 0, 0, wait_seconds=0.4)
    leases = bench.lease(2)
    bench.complete(leases[0])
    woken: list[float] = []

    def wait() -> None:
        bench.client.get_plan("actor", 1, 0, 0, 0)
        woken.append(time.perf_counter())

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for(lambda: bench.client.status().waits)
    before = time.perf_counter()
    bench.complete(leases[1])
    thread.join(5)
    assert woken[0] - before < 0.5
    with pytest.raises(DeadlineExceeded, match="no group is pending"):
        bench.lease(1, seconds=0.4)
    with pytest.raises(DeadlineExceeded, match="server t has not confirmed a version under term 1"):
        bench.lease(1, server="t", seconds=0.4)


def test_I5_a_field_without_a_writer_is_refused_and_a_missing_one_is_named(bench: Any) -> None:
    extra = pb.Field(name="ref_log_probs", dtype="float32", shape=[-1], scope=pb.SCOPE_ROW, writer="reference")
    with pytest.raises(InvalidInput, match="consumer critic reads field values, which nobody"):
        bench.open(consumers=[pb.Consumer(name="critic", fields=["values"], needs_version=pb.NEEDS_VERSION_ANY)])
    bench.begin(groups=2, extra_fields=[extra])
    for lease in bench.lease(2):
        bench.complete(lease)
    answer = bench.client.get_plan("actor", 1, 0, 0, 0)
    assert answer.chunk is not None
    rows = [row for batch in answer.chunk.ranks[0] for row in batch.rows]
    read: list[Any] = []
    thread = threading.Thread(
        target=lambda: read.append(bench.client.read_rows(answer.plan, rows, ["ref_log_probs"])["ref_log_probs"])
    )
    thread.start()
    what = wait_for(lambda: [w.what for w in bench.client.status().waits])[0]
    assert what == "field ref_log_probs of step 0: role reference writes it"
    values = ragged("row", [np.full(5, i, np.float32) for i in range(4)])
    with pytest.raises(Precondition, match="is written by reference"):
        bench.client.write_field("actor", 1, "ref_log_probs", rows, values)
    bench.client.write_field("reference", 1, "ref_log_probs", rows, values)
    thread.join(5)
    assert [read[0].unit(i)[0] for i in range(4)] == [0, 1, 2, 3]
    bench.client.write_field("reference", 1, "ref_log_probs", rows, values)
    with pytest.raises(AlreadyExists):
        bench.client.write_field("reference", 1, "ref_log_probs", rows, ragged("row", [np.ones(5, np.float32)] * 4))


def test_I8_old_terms_and_lost_leases_are_refused_and_repeats_get_the_stored_answer(bench: Any) -> None:
    bench.begin(groups=4)
    first, second = bench.lease(2)
    header = bench.header(first, completes_group=pb.GROUP_OUTCOME_OK)
    assert bench.client.put(header, bench.columns()) == "accepted"
    bench.client.register_term("s", 2)
    assert bench.client.put(header, bench.columns()) == "accepted", "a repeat is answered before it is fenced"
    with pytest.raises(AlreadyExists):
        bench.client.put(header, bench.columns(seed=1))
    with pytest.raises(Precondition) as stale:
        bench.complete(second)
    assert stale.value.reason == "STALE_TERM"
    with pytest.raises(Precondition) as gone:
        bench.client.put(bench.header(second, term=2, completes_group=pb.GROUP_OUTCOME_OK), bench.columns())
    assert gone.value.reason == "LEASE_GONE"
    bench.client.register_term("actor", 5)
    for call in (
        lambda: bench.client.get_plan("actor", 4, 0, 0, 0),
        lambda: bench.client.renew_leases("s", 1, []),
        lambda: bench.client.register_term("actor", 4),
        lambda: bench.lease(server="s", term=1),
    ):
        with pytest.raises(Precondition) as old:
            call()
        assert old.value.reason == "STALE_TERM"


def test_a_lease_runs_out_unless_it_is_renewed_and_keeps_its_whole_samples(bench: Any) -> None:
    bench.begin(groups=1, lease_ttl_seconds=0.6)
    (lease,) = bench.lease()
    bench.client.put(bench.header(lease, samples=range(1)), bench.columns(samples=1))
    for _ in range(4):
        time.sleep(0.3)
        assert bench.client.renew_leases("s", 1, [("g0", 1)]) == []
    wait_for(lambda: bench.client.status().counts.pending == 1)
    assert bench.client.renew_leases("s", 1, [("g0", 1)]) == [("g0", 1)]
    with pytest.raises(Precondition) as gone:
        bench.complete(lease)
    assert gone.value.reason == "LEASE_GONE"
    (again,) = bench.lease()
    assert (again.group.group, again.attempt, len(again.kept.rows)) == ("g0", 2, 1)
    header = bench.header(again, samples=range(1, 2), completes_group=pb.GROUP_OUTCOME_OK)
    assert bench.client.put(header, bench.columns(samples=1, seed=1)) == "accepted"
    assert len(bench.client.inspect("g0").rows) == 2
    assert bench.client.status().counts.leases_lost == 1


def test_a_group_that_is_given_back_comes_first_with_its_samples(bench: Any) -> None:
    bench.begin(groups=3)
    (lease,) = bench.lease()
    bench.client.return_group(bench.header(lease, samples=range(1)), bench.columns(samples=1))
    again = bench.lease(2)
    assert [a.group.group for a in again] == ["g0", "g1"]
    header = bench.header(again[0], completes_group=pb.GROUP_OUTCOME_OK)
    assert bench.client.put(header, bench.columns()) == "accepted", "the kept sample may come again with the others"
    assert len(bench.client.inspect("g0").rows) == 2
    assert bench.client.status().counts.leases_lost == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward": Column("sample", np.zeros(2, np.float64))}, "field reward: dtype float64 came"),
        ({"reward": Column("row", np.zeros(2, np.float32))}, "field reward: scope row came"),
        ({"reward": Column("sample", np.zeros(3, np.float32))}, "field reward: 3 values came for 2 units"),
        ({"nonsense": Column("sample", np.zeros(2, np.float32))}, "field nonsense is not in the schema"),
        ({"tokens": ragged("row", [np.zeros(17, np.int32)] * 2)}, "field tokens: a value has 68 bytes"),
        ({"tokens": ragged("row", [np.zeros(4, np.int32)] * 2)}, "differ in length within a row"),
        ({"reward": Column("sample", np.array([0, np.nan], np.float32))}, "not finite"),
        ({"reward": None}, "field reward is missing"),
        ({"versions": ragged("row", [np.full(5, -1, np.int64)] * 2)}, "has no policy version"),
    ],
)
def test_bad_columns_are_refused_by_name_and_store_nothing(bench: Any, change: dict[str, Any], said: str) -> None:
    bench.begin(groups=1)
    (lease,) = bench.lease()
    columns = {k: v for k, v in (bench.columns() | change).items() if v is not None}
    header = bench.header(lease, completes_group=pb.GROUP_OUTCOME_OK)
    with pytest.raises((InvalidInput, NotFound), match=said):
        bench.client.put(header, columns)
    status = bench.client.status()
    assert (status.bytes_held, status.counts.leased) == (0, 1)
    assert bench.complete(lease) == "accepted"


def test_bad_frames_and_unknown_names_are_typed_errors(bench: Any) -> None:
    bench.begin(groups=1)
    (lease,) = bench.lease()
    header = bench.header(lease, completes_group=pb.GROUP_OUTCOME_OK)
    block = bytearray(1000)

    def send(content: bytes) -> None:
        header.size_bytes = len(content)
        portal().call(bench.client.aio.rows.send("put_frames", header, pb.PutRequest, [content]))

    refused: list[tuple[Any, str]] = [
        (lambda: send(bytes(block)), "not a column block"),
        (lambda: send(bytes(1 << 21)), "a group may hold"),
        (
            lambda: bench.client.put(bench.header(lease, samples=range(1, 3), completes_group=1), bench.columns()),
            "has 2",
        ),
        (
            lambda: bench.client.put(bench.header(lease, samples=range(1), completes_group=1), bench.columns(1)),
            r"samples \[1\] were never put",
        ),
        (lambda: bench.client.get_plan("critic", 1, 0, 0, 0), "consumer critic is not in the schema"),
        (lambda: bench.client.inspect("g9"), "group g9 was never offered"),
        (lambda: bench.client.get_blob("0" * 32), "is not stored"),
        (lambda: bench.offer(1, first=7, blobs=["0" * 32]), "put it first"),
        (lambda: bench.client.offer_groups([pb.PromptGroup(group="g0", prompt_json="2")], 1), "with another prompt"),
        (lambda: bench.open(prompts_per_step=3), "open with another recipe"),
    ]
    for call, said in refused:
        with pytest.raises(RelaxError, match=said):
            call()
    assert bench.client.status().bytes_held == 0


def test_I4_a_run_that_does_not_fit_its_budget_is_refused_with_the_sizes(bench: Any) -> None:
    with pytest.raises(RelaxError, match=r"need \d+ bytes, memory_budget_bytes is 20000"):
        bench.open(memory_budget_bytes=20_000)


def test_group_scoped_columns_and_a_shared_blob_come_back_bit_by_bit(bench: Any) -> None:
    positions = pb.Field(
        name="positions", dtype="int64", shape=[3, -1], scope=pb.SCOPE_GROUP, writer="rollout", bytes_max=3 * 8 * 700
    )
    patches = pb.Field(
        name="patches",
        dtype="float32",
        shape=[-1, 1176],
        scope=pb.SCOPE_GROUP,
        writer="rollout",
        bytes_max=4 * 1176 * 640,
    )
    random = np.random.default_rng(0)
    blob = random.bytes(3_000_000)
    bench.open(extra_fields=[positions, patches], samples_per_prompt=8, prompts_per_step=1)
    name = bench.client.put_blob(blob)
    bench.offer(1, blobs=[name])
    bench.dcs.commit(0)
    bench.dcs.confirm("s", 1, 0)
    (lease,) = bench.lease()
    assert bench.client.get_blob(lease.group.blobs[0]) == blob
    position = random.integers(0, 1 << 40, (3, 640))
    patch = random.standard_normal((640, 1176)).astype(np.float32)
    columns = bench.columns(samples=8) | {
        "positions": ragged("group", [position], transposed=True),
        "patches": ragged("group", [patch]),
    }
    header = bench.header(lease, samples=range(8), completes_group=pb.GROUP_OUTCOME_OK)
    assert bench.client.put(header, columns) == "accepted"
    answer = bench.client.get_plan("actor", 1, 0, 0, 0)
    assert answer.chunk is not None
    rows = [row for batch in answer.chunk.ranks[0] for row in batch.rows]
    got = bench.client.read_rows(answer.plan, rows, ["positions", "patches", "tokens"])
    assert got["positions"].unit(0).shape == (3, 640)
    np.testing.assert_array_equal(got["positions"].unit(0), position)
    np.testing.assert_array_equal(got["patches"].unit(0), patch)
    assert got["patches"].units == 1
    closing = bench.client.get_plan("actor", 1, 0, 0, 1).close
    assert closing is not None
    bench.dcs.commit(1, closing.groups, closing.plan_digest)
    bench.dcs.snapshot(1)
    wait_for(lambda: bench.client.status().bytes_held == 0)
    wait_for(lambda: not list((bench.queue.state_dir / "runs" / bench.run / "blobs").iterdir()))
    with pytest.raises(NotFound):
        bench.client.get_blob(name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lease_ttl_seconds": float("nan")}, "lease_ttl_seconds is nan"),
        ({"lease_ttl_seconds": float("inf")}, "lease_ttl_seconds is inf"),
        ({"lease_ttl_seconds": -1.0}, "lease_ttl_seconds is -1.0"),
        ({"closing_deadline_seconds": float("nan")}, "closing_deadline_seconds is nan"),
        (
            {"closing": pb.CLOSING_MIN_N, "closing_min_prompts": 1, "closing_deadline_seconds": float("inf")},
            "closing_deadline_seconds is inf",
        ),
    ],
)
def test_seconds_that_are_no_numbers_are_refused(bench: Any, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        bench.open(**change)


@pytest.mark.parametrize("term", [0, 2**64 - 1, 5000])
def test_I8_one_call_cannot_fence_a_holder_for_good(bench: Any, term: int) -> None:
    bench.begin()
    bench.client.register_term("actor", 3)
    with pytest.raises(InvalidInput, match=f"term {term} of actor"):
        bench.client.register_term("actor", term)
    bench.client.register_term("actor", 4)
    with pytest.raises(InvalidInput, match="term 0 of s"):
        bench.lease(term=0)


def test_a_watcher_ahead_of_the_log_is_refused_and_disturbs_nobody(bench: Any) -> None:
    bench.begin()
    with pytest.raises(Precondition, match="the watcher has seen 1000000000"):
        bench.events(after=10**9, seconds=5.0)
    assert bench.client.status().counts.offered == 4


def test_too_little_address_space_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "relax_queue", "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "state")]
    limit = (8 << 30, 8 << 30)
    done = subprocess.run(
        [*command, "--arena-bytes", str(64 << 30)],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit),
    )
    assert done.returncode == 1
    assert "lower --arena-bytes" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
