"""A real queue daemon on a free port, and a dcs that has nothing but a log."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.bus.dcs_log import DcsLog
from relax.queue.v1 import queue_pb2 as pb
from relax_common.process.host import keepable_port
from relax_common.rpc.portal import portal
from relax_queue.client import ROW_FIELDS, Column, QueueClient, TransportName, block_to, to_columns

SCOPES = {"row": pb.SCOPE_ROW, "sample": pb.SCOPE_SAMPLE, "group": pb.SCOPE_GROUP}


def negotiated(client: QueueClient) -> Any:
    """The transport of a client, for tests that send what the client would not."""
    return portal().call(client.aio.connection.use(10.0))


def ask(transport: Any, method: str, request: Any, seconds: float = 5.0) -> Any:
    """One call on a transport; raises grpc.RpcError."""

    async def call() -> Any:
        return await getattr(transport.stub, method)(request, timeout=seconds)

    return portal().call(call())


class QueueProcess:
    """The daemon as its users start it; survives kill -9 by being started again on the same state and port."""

    def __init__(self, folder: Path, prefix: tuple[str, ...] = ()) -> None:
        self._folder = folder
        self._prefix = prefix
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"127.0.0.1:{keepable_port()}"

    def start(self, **environment: str) -> None:
        address_file = self._folder / "address"
        address_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "relax_queue", "--listen", self.address, "--state-dir", self._folder / "state"]
        with (self._folder / "queue.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._prefix, *map(str, command), "--address-file", str(address_file)],
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
            )
        end = time.monotonic() + 20
        while not address_file.exists():
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < end, self.log()
            time.sleep(0.01)
        self.address = address_file.read_text().strip()

    @property
    def metrics_address(self) -> str:
        found = re.findall(r"metrics=(\S+)|\"metrics\": ?\"([^\"]+)\"", self.log())
        return next(filter(None, found[-1]))

    def log(self) -> str:
        return (self._folder / "queue.log").read_text()

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10)

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(10)

    def terminate(self) -> int:
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(20)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def state_dir(self) -> Path:
        return self._folder / "state"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()


class Bench:
    """One run on a queue and a dcs log, with short ways to do what its daemons do."""

    def __init__(self, queue: QueueProcess, dcs: DcsLog, run: str, transport: TransportName = "auto") -> None:
        self.queue = queue
        self.dcs = dcs
        self.run = run
        self.client = QueueClient(queue.address, run, transport)

    def spec(self, **changes: Any) -> pb.RunSpec:
        spec = pb.RunSpec(
            fields=[
                pb.Field(name=f.name, dtype=f.dtype, shape=f.shape, scope=SCOPES[f.scope], writer=f.writer)
                for f in ROW_FIELDS
            ],
            consumers=[
                pb.Consumer(name="actor", fields=["tokens", "reward"], needs_version=pb.NEEDS_VERSION_STEP),
            ],
            prompts_per_step=2,
            samples_per_prompt=2,
            max_staleness=1,
            snapshot_every=1,
            tokens_per_row_max=16,
            tokens_per_microbatch=32,
            data_parallel_size=1,
            packer=pb.PACKER_TOKEN_BUDGET,
            stale_policy=pb.STALE_POLICY_WAIT,
            min_valid_samples=2,
            max_refills_per_step=2,
            memory_budget_bytes=1 << 30,
            lease_ttl_seconds=30.0,
        )
        fields = changes.pop("extra_fields", ())
        spec.fields.extend(fields)
        spec.MergeFrom(pb.RunSpec(**changes))
        return spec

    def open(self, **changes: Any) -> None:
        self.client.open_run(self.spec(**changes), "digest", self.dcs.address)

    def begin(self, groups: int = 4, server: str = "s", **changes: Any) -> None:
        """Open, offer, commit version 0, confirm it."""
        self.open(**changes)
        self.offer(groups)
        self.dcs.commit(0)
        self.dcs.confirm(server, 1, 0)

    def offer(self, groups: int, first: int = 0, **more: Any) -> None:
        offers = [
            pb.PromptGroup(group=f"g{i}", position=i, prompt_json="1", **more) for i in range(first, first + groups)
        ]
        self.client.offer_groups(offers, term=1)

    def lease(self, credits: int = 1, server: str = "s", term: int = 1, seconds: float = 5.0) -> list[Any]:
        return list(self.client.lease_groups(server, term, credits, seconds))

    def header(
        self, lease: Any, samples: range = range(2), server: str = "s", term: int = 1, **more: Any
    ) -> pb.PutHeader:
        group = lease.group.group
        return pb.PutHeader(
            run=self.run,
            server=server,
            term=term,
            lease=pb.LeaseKey(group=group, attempt=lease.attempt),
            rows=block_to([(group, s, 0) for s in samples]),
            **more,
        )

    def columns(self, samples: int = 2, version: int = 0, n_tokens: int = 5, seed: int = 0) -> dict[str, Column]:
        """Prompt of two tokens, the rest sampled under `version`."""
        mask = [0, 0] + [1] * (n_tokens - 2)
        return to_columns(
            {
                "tokens": [np.arange(n_tokens) + seed + s for s in range(samples)],
                "loss_mask": [mask] * samples,
                "log_probs": [np.linspace(-1, 0, n_tokens)] * samples,
                "versions": [np.where(mask, version, -1)] * samples,
                "temperature": [1.0] * samples,
                "reward": [float(s) for s in range(samples)],
                "reward_status": [0] * samples,
            }
        )

    def complete(self, lease: Any, version: int = 0, **more: Any) -> str:
        header = self.header(lease, completes_group=pb.GROUP_OUTCOME_OK)
        return self.client.put(header, self.columns(version=version, **more))

    def events(self, after: int = 0, seconds: float = 1.0) -> list[Any]:
        return list(self.client.watch_events(after, seconds))


@pytest.fixture
def dcs() -> Iterator[DcsLog]:
    log = DcsLog()
    yield log
    log.stop()


@pytest.fixture(scope="session")
def shared_queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QueueProcess]:
    process = QueueProcess(tmp_path_factory.mktemp("queue"))
    process.start()
    yield process
    process.stop()


@pytest.fixture
def bench(shared_queue: QueueProcess, dcs: DcsLog) -> Iterator[Bench]:
    """A run of its own on the daemon that all tests share."""
    bench = Bench(shared_queue, dcs, f"run-{time.monotonic_ns()}")
    yield bench
    bench.client.close()


@pytest.fixture(scope="session")
def make_bench() -> type[Bench]:
    return Bench


@pytest.fixture(scope="session")
def transport_of() -> Callable[[QueueClient], Any]:
    return negotiated


@pytest.fixture(scope="session")
def ask_on() -> Callable[..., Any]:
    return ask


@pytest.fixture(scope="session")
def make_queue() -> type[QueueProcess]:
    return QueueProcess


@pytest.fixture
def own(tmp_path: Path, dcs: DcsLog) -> Iterator[Bench]:
    """A run on a daemon that the test may kill."""
    process = QueueProcess(tmp_path)
    process.start()
    bench = Bench(process, dcs, "run")
    yield bench
    bench.client.close()
    process.stop()


@pytest.fixture
def bench_class() -> Any:
    """Make a run on a daemon that is started through another command."""

    def make(folder: Path, dcs: DcsLog, prefix: tuple[str, ...]) -> Bench:
        process = QueueProcess(folder, prefix)
        process.start()
        return Bench(process, dcs, "run")

    return make
