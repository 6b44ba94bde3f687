"""What Prometheus sees of a run: bytes, rows by state, oldest lease, waits by what was missing, refusals by reason."""

import re
import time
import urllib.request
from collections.abc import Callable
from threading import Thread
from typing import Any

import numpy as np
import pytest

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import DeadlineExceeded
from relax_queue.client import ragged


def scraper(address: str, run: str) -> Callable[..., float]:
    def value(name: str, **labels: str) -> float:
        text = urllib.request.urlopen(f"http://{address}/metrics", timeout=5).read().decode()
        for line in text.splitlines():
            wanted = labels if name == "relax_queue_wake_seconds_count" else labels | {"run": run}
            if line.startswith(name) and all(f'{k}="{v}"' in line for k, v in wanted.items()):
                return float(line.rpartition(" ")[2])
        return 0.0

    return value


def test_the_metrics_of_a_run(bench: Any) -> None:
    extra = pb.Field(name="values", dtype="float32", shape=[-1], scope=pb.SCOPE_ROW, writer="critic")
    consumers = [pb.Consumer(name="learner", fields=["tokens", "values"], needs_version=pb.NEEDS_VERSION_STEP)]
    found = re.search(r"metrics\W+(127\.0\.0\.1:\d+)", bench.queue.log())
    assert found, bench.queue.log()[:2000]
    value = scraper(found.group(1), bench.run)
    bench.begin(groups=6, extra_fields=[extra], consumers=consumers)
    leases = bench.lease(4)
    bench.complete(leases[0])
    with pytest.raises(DeadlineExceeded):
        bench.lease(1, seconds=0.3)
    with pytest.raises(DeadlineExceeded):
        bench.client.get_plan("learner", 1, 0, 0, 0, wait_seconds=0.4)
    bench.complete(leases[1])
    answer = bench.client.get_plan("learner", 1, 0, 0, 0)
    rows = [row for batch in answer.chunk.ranks[0] for row in batch.rows]
    thread = Thread(target=lambda: bench.client.read_rows(answer.plan, rows, ["values"]))
    thread.start()
    time.sleep(0.3)
    bench.client.write_field("critic", 1, "values", rows, ragged("row", [np.ones(5, np.float32)] * 4))
    thread.join(5)
    time.sleep(0.3)  # gauges are set a few times per second
    assert value("relax_queue_bytes", kind="held") > 500
    assert value("relax_queue_bytes", kind="reserved") > value("relax_queue_bytes", kind="held")
    assert value("relax_queue_rows", state="planned") == 4
    assert value("relax_queue_groups", state="pending") == 2
    end = time.monotonic() + 5
    while value("relax_queue_oldest_lease_seconds") <= 1:
        assert time.monotonic() < end, "the oldest lease does not grow older"
        time.sleep(0.1)
    assert value("relax_queue_lease_refusals_total", reason="staleness") == 1
    assert 0.2 < value("relax_queue_wait_seconds_total", consumer="learner", missing="plan") < 2
    assert 0.2 < value("relax_queue_wait_seconds_total", consumer="learner", missing="values") < 2
    assert value("relax_queue_wake_seconds_count") > 0
    assert value("relax_queue_disk_bytes", kind="log") > 500
