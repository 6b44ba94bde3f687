"""TransferQueue under the same cases, in its own environment: a writer actor, a reader actor, local Ray.

It reads commands as lines of JSON on stdin and answers with lines of JSON on stdout. The processes that move rows
(writer, reader, controller, storage units) are counted, Ray's own daemons are not.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "1")
os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")
os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")

import ray
import torch
import transfer_queue
from cases import CASES, Case, flat_values, lengths_of, payload_bytes
from measure import cpu_seconds, rss_bytes
from omegaconf import OmegaConf
from tensordict import TensorDict

STORAGE_UNITS = 2
CONFIG = {
    "controller": {"sampler": "SequentialSampler", "polling_mode": False},
    "backend": {
        "storage_backend": "SimpleStorage",
        "SimpleStorage": {"total_storage_size": None, "num_data_storage_units": STORAGE_UNITS},
    },
}
ACTORS = ("Writer", "Reader", "TransferQueueController", "SimpleStorageUnit")


def tensors_of(case: Case) -> TensorDict:
    values = torch.from_numpy(flat_values(case))
    names = [f"f{i}" for i in range(case.fields)]
    if not case.ragged:
        return TensorDict({n: values.reshape(case.samples, case.length) for n in names}, batch_size=case.samples)
    parts = list(torch.split(values, lengths_of(case).tolist()))
    return TensorDict(
        {n: torch.nested.as_nested_tensor(parts, layout=torch.jagged) for n in names}, batch_size=case.samples
    )


class Client:
    def __init__(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        transfer_queue.init(OmegaConf.create(config))
        self._client = transfer_queue.get_client()

    def pid(self) -> int:
        return os.getpid()


@ray.remote(num_cpus=0.001)
class Writer(Client):
    def make(self, case: Case) -> None:
        self._tensors = tensors_of(case)

    def put(self, partition: str) -> float:
        begun = time.perf_counter()
        self._client.put(data=self._tensors, partition_id=partition)
        return time.perf_counter() - begun

    def clear(self, partition: str) -> None:
        self._client.clear_partition(partition)


@ray.remote(num_cpus=0.001)
class Reader(Client):
    def get(self, partition: str, fields: list[str], count: int) -> float:
        begun = time.perf_counter()
        meta = self._client.get_meta(data_fields=fields, batch_size=count, partition_id=partition, task_name="reader")
        got = self._client.get_data(meta)
        seconds = time.perf_counter() - begun
        assert got.batch_size[0] == count, "other rows came than were sent"
        return seconds


def actors(*names: str) -> list[int]:
    """Process ids by the titles that Ray gives its workers."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                title = file.read().split(b"\0")[0].decode(errors="replace")
        except OSError:
            continue  # ended while we looked
        if title.startswith("ray::") and any(name in title for name in names):
            found.append(int(entry))
    return found


class Peer:
    def __init__(self) -> None:
        self._writer, self._reader = Writer.remote(CONFIG), Reader.remote(CONFIG)
        ray.get([self._writer.pid.remote(), self._reader.pid.remote()])
        self._partitions = 0

    def repetition(self, case: Case, warm_up: int) -> dict[str, Any]:
        ray.get(self._writer.make.remote(case))
        for _ in range(warm_up):
            self._transfer(case)
        pids = actors(*ACTORS)
        before = sum(map(cpu_seconds, pids))
        times = [self._transfer(case) for _ in range(case.transfers)]
        cpu = sum(map(cpu_seconds, pids)) - before
        return {
            "n_bytes": payload_bytes(case) * case.transfers,
            "cpu_seconds": cpu,
            "put_seconds": [t[0] for t in times],
            "get_seconds": [t[1] for t in times],
        }

    def _transfer(self, case: Case) -> tuple[float, float]:
        partition = self._next()
        put = ray.get(self._writer.put.remote(partition))
        names = [f"f{i}" for i in range(case.fields)]
        got = ray.get(self._reader.get.remote(partition, names, case.samples))
        ray.get(self._writer.clear.remote(partition))
        return put, got

    def _next(self) -> str:
        self._partitions += 1
        return f"p{self._partitions}"

    def memory(self, case: Case) -> dict[str, Any]:
        ray.get(self._writer.make.remote(case))
        before = sum(map(rss_bytes, actors("SimpleStorageUnit")))
        partitions = [self._next() for _ in range(case.held)]
        for partition in partitions:
            ray.get(self._writer.put.remote(partition))
        added = sum(map(rss_bytes, actors("SimpleStorageUnit"))) - before
        for partition in partitions:
            ray.get(self._writer.clear.remote(partition))
        return {"ratio": added / (case.held * payload_bytes(case))}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    ray.init(
        num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20, logging_level="ERROR"
    )
    # The first peer answers for memory: its storage has held nothing yet.
    peer, by_name = Peer(), {case.name: case for case in CASES}
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        told = json.loads(line)
        case = by_name[told["case"]]
        result = peer.memory(case) if told["what"] == "memory" else peer.repetition(case, told["warm_up"])
        print(json.dumps(result), file=answers)
    ray.shutdown()


main()
