"""The queue daemon over its wire: one step of a run, bad input, waits."""

import time
from typing import Any

import numpy as np
import pytest

from relax_common.errors import Precondition


def test_a_step_goes_from_offer_to_trained(bench: Any) -> None:
    bench.begin()
    leases = bench.lease(credits=2)
    assert [lease.group.group for lease in leases] == ["g0", "g1"]
    assert [bench.complete(lease, seed=i) for i, lease in enumerate(leases)] == ["accepted", "accepted"]
    answer = bench.client.get_plan("actor", 1, 0, 0, 0)
    assert answer.chunk is not None and answer.chunk.groups == ("g0", "g1")
    rows = [row for batch in answer.chunk.ranks[0] for row in batch.rows]
    columns = bench.client.read_rows(answer.plan, rows, ["tokens", "reward"])
    for i, (group, sample, _) in enumerate(rows):
        assert columns["tokens"].unit(i).tolist() == (np.arange(5) + int(group[1]) + sample).tolist()
    closing = bench.client.get_plan("actor", 1, 0, 0, 1).close
    assert closing is not None and (closing.n_tokens, closing.n_samples) == (12, 4)
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


def wait_for(ready: Any, seconds: float = 5.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := ready()):
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.005)
    return value
