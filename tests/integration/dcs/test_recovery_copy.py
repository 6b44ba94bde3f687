"""The recovery state on dcs's own disk: it survives dcs and the actor ending together, and a disk that refuses."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from dcs.client import DcsClient, SliceData
from relax.controller.v1 import controller_pb2, controller_pb2_grpc
from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc
from relax_common.errors import DataLoss
from relax_common.rpc.channels import sync_channel
from relax_common.versions import PolicyVersion

RUN = "r"
STATE = b"state %d" + bytes(5000)


class Run:
    """A run whose recovery state is kept on disk."""

    def __init__(self, daemon: object, **changes: object) -> None:
        self.daemon = daemon
        self.stub = dcs_pb2_grpc.DcsServiceStub(sync_channel(daemon.address))  # type: ignore[attr-defined]
        values: dict[str, object] = {"snapshot_every": 1, "recovery_on_disk": True, "memory_budget_bytes": 1 << 20}
        request = dcs_pb2.OpenRunRequest(
            run=RUN,
            snapshot_ranks={"actor": 2},
            **(values | changes),  # type: ignore[arg-type]
        )
        self.stub.OpenRun(request, timeout=10)
        self.client = DcsClient(daemon.address, RUN)  # type: ignore[attr-defined]
        self.client.register_term("actor", 1)

    def make_version(self) -> PolicyVersion:
        client = self.client
        version = client.head().next_version()
        attempt = client.begin("actor", version, 1)
        client.push(version, attempt, 1, weights(version.number))
        record = dcs_pb2.CommitRecord(version=version.to_proto(), term=1, attempt=attempt)
        if version.number:
            record.step = version.number - 1
        client.commit(record)
        for rank in range(2) if version.number else ():
            client.put_snapshot(version, attempt, "actor", rank, 1, [STATE % version.number])
        return version

    def wait_for_copy(self, number: int) -> None:
        wait_for(lambda: self.client.head_message().recovery_on_disk.number == number)

    @property
    def files(self) -> list[Path]:
        folder = self.daemon.folder / "state" / "recovery" / RUN  # type: ignore[attr-defined]
        return sorted(folder.glob("*")) if folder.is_dir() else []

    def restart(self) -> None:
        self.daemon.kill()  # type: ignore[attr-defined]
        self.daemon.restart()  # type: ignore[attr-defined]
        self.stub = dcs_pb2_grpc.DcsServiceStub(sync_channel(self.daemon.address))  # type: ignore[attr-defined]


class Controller(controller_pb2_grpc.ControllerServiceServicer):
    """Hears what the daemon waits for, as relaxd does for `relaxctl status`."""

    def __init__(self) -> None:
        self.address = ""
        self.waits_for = ""

    def Register(
        self, request: controller_pb2.RegisterRequest, context: grpc.ServicerContext
    ) -> controller_pb2.RegisterResponse:
        return controller_pb2.RegisterResponse(term=1, ttl_seconds=1.0, controller=request.identity)

    def Heartbeat(
        self, request: controller_pb2.HeartbeatRequest, context: grpc.ServicerContext
    ) -> controller_pb2.HeartbeatResponse:
        self.waits_for = request.waits_for
        return controller_pb2.HeartbeatResponse()


@pytest.fixture
def controller() -> Iterator[Controller]:
    server, controller = grpc.server(ThreadPoolExecutor(2)), Controller()
    controller_pb2_grpc.add_ControllerServiceServicer_to_server(controller, server)
    controller.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield controller
    server.stop(None)


def weights(number: int) -> list[SliceData]:
    return [SliceData("w", (4, 2), (start, 0), (2, 2), "F32", bytes([number + start]) * 16) for start in (0, 2)]


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_dcs_and_actor_ending_together_lose_no_committed_step(start_daemon: Callable) -> None:
    run = Run(start_daemon("dcs"))
    for _ in range(4):
        run.make_version()
    run.wait_for_copy(3)
    run.restart()  # and there is no actor that could push anything again
    head = run.client.head()
    assert (head.head, head.recovery, head.recovery_in_memory) == (PolicyVersion(0, 3), PolicyVersion(0, 3), False)
    assert run.client.get_snapshot(head.recovery, "actor", 1) == STATE % 3
    wait_for(lambda: run.client.head().holds_head_bytes)
    assert [bytes(data) for _, data in run.client.pull(PolicyVersion(0, 3))] == [b"\3" * 16, b"\5" * 16]
    run.make_version()
    run.wait_for_copy(4)


def test_there_is_one_complete_copy_and_at_most_one_unfinished(start_daemon: Callable) -> None:
    run = Run(start_daemon("dcs"))
    for _ in range(12):
        run.make_version()
        assert len(run.files) <= 3  # a complete one, its successor before the older goes, an unfinished one
    run.wait_for_copy(11)
    wait_for(lambda: [path.name for path in run.files] == ["version-00000011.0"])
    assert run.files[0].stat().st_mode & 0o077 == 0
    run.stub.EndRun(dcs_pb2.EndRunRequest(run=RUN), timeout=10)
    assert run.files == []


def test_without_the_key_nothing_is_written(start_daemon: Callable) -> None:
    run = Run(start_daemon("dcs"), recovery_on_disk=False)
    for _ in range(3):
        run.make_version()
    run.restart()
    assert run.files == []
    assert run.client.head().recovery == PolicyVersion(0, 0)


def test_killed_while_a_copy_is_written_the_one_before_is_intact(start_daemon: Callable, tmp_path: Path) -> None:
    point = "dcs.recovery_copy_before_fsync"
    daemon = start_daemon("dcs", RELAX_FAILPOINTS=f"{point}=kill@2", RELAX_FAILPOINTS_DIR=str(tmp_path))
    run = Run(daemon)
    for _ in range(2):
        run.make_version()
    run.wait_for_copy(1)
    maker = threading.Thread(target=run.make_version)
    maker.start()
    assert daemon.process.wait(20) == -9
    assert [path.name for path in run.files] == ["version-00000001.0", "version-00000002.0.unfinished"]
    daemon.restart()
    maker.join(60)
    assert "version-00000001.0" in [path.name for path in run.files]
    assert run.client.head().recovery.number >= 1


def test_a_damaged_copy_is_found_by_its_hashes_and_not_used(start_daemon: Callable) -> None:
    run = Run(start_daemon("dcs"))
    for _ in range(3):
        run.make_version()
    run.wait_for_copy(2)
    wait_for(lambda: len(run.files) == 1)
    data = bytearray(run.files[0].read_bytes())
    data[-1] ^= 1
    run.files[0].write_bytes(data)
    run.restart()
    assert run.client.head().recovery == PolicyVersion(0, 2)
    with pytest.raises(DataLoss, match="the state of actor rank 1 is not what was written"):
        run.client.get_snapshot(PolicyVersion(0, 2), "actor", 1)
    assert run.client.head().recovery == PolicyVersion(0, 0)
    rollback = dcs_pb2.RollbackRequest(run=RUN, lost_head=PolicyVersion(0, 2).to_proto(), reason="a test")
    record = run.stub.Rollback(rollback, timeout=10).record
    assert (record.head, record.lost_head.number, record.reason) == (0, 2, "a test")


def test_a_rollback_goes_back_to_the_copy_and_no_further(start_daemon: Callable) -> None:
    run = Run(start_daemon("dcs"), snapshot_every=2)
    for _ in range(4):
        version = run.client.head().next_version()
        attempt = run.client.begin("actor", version, 1)
        run.client.push(version, attempt, 1, weights(version.number))
        run.client.commit(dcs_pb2.CommitRecord(version=version.to_proto(), term=1, attempt=attempt))
        for rank in range(2) if version.number == 2 else ():
            run.client.put_snapshot(version, attempt, "actor", rank, 1, [STATE % 2])
    run.wait_for_copy(2)
    run.restart()
    rollback = dcs_pb2.RollbackRequest(run=RUN, lost_head=PolicyVersion(0, 3).to_proto(), reason="a test")
    assert run.stub.Rollback(rollback, timeout=10).record.head == 2


def limit_files(daemon: object, size_bytes: int) -> None:
    """Limits the bytes that a process may write to one file, which looks to it like a disk that refuses."""
    pid = daemon.process.pid  # type: ignore[attr-defined]
    hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size_bytes, hard))


def test_a_disk_without_room_for_the_copy_does_not_stop_the_run(start_daemon: Callable) -> None:
    daemon = start_daemon("dcs")
    run = Run(daemon)
    run.make_version()
    run.make_version()
    run.wait_for_copy(1)
    log = daemon.folder / "state" / "runs" / f"{RUN}.log"
    limit_files(daemon, 8000)  # the log stays below that, a copy of two states does not
    for _ in range(3):
        run.make_version()
    wait_for(lambda: "recovery_copy_failed" in daemon.log)
    assert log.stat().st_size < 8000
    assert [path.name for path in run.files] == ["version-00000001.0"]
    wait_for(lambda: _announced(run) == 4)
    limit_files(daemon, resource.RLIM_INFINITY)
    run.make_version()
    run.wait_for_copy(5)


@contextmanager
def a_disk_that_hangs(run: Run, number: int) -> Iterator[None]:
    """The copy of this version is not written before the block ends: its file is a pipe that nobody reads."""
    folder = run.daemon.folder / "state" / "recovery" / RUN  # type: ignore[attr-defined]
    folder.mkdir(exist_ok=True)
    pipe = folder / f"version-{number:08}.0.unfinished"
    os.mkfifo(pipe)
    try:
        yield
    finally:
        wait_for(lambda: _broken(pipe))


def _broken(pipe: Path) -> bool:
    """Reads nothing and goes away, which the writer is told; it then deletes its file."""
    if pipe.is_fifo():
        os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
    return not pipe.is_fifo()


def test_a_commit_does_not_wait_for_a_disk_that_is_slower_than_training(start_daemon: Callable) -> None:
    daemon = start_daemon("dcs")
    run = Run(daemon, snapshot_every=8)
    run.make_version()
    with a_disk_that_hangs(run, 1):
        for _ in range(8):
            run.make_version()
        head = run.client.head_message()
        assert (head.head.number, head.recovery.number, head.recovery_on_disk.number) == (8, 8, 0)
        assert _announced(run) == 0, "rows from which a state on disk can be brought up to date are kept"
        # The copy in progress holds its own version, and no more are held than that.
        assert head.memory_bytes < 4 * 2 * len(STATE % 8 + b" ")
    run.wait_for_copy(8)
    wait_for(lambda: _announced(run) == 8)


def test_a_version_waits_by_name_for_a_copy_that_is_more_than_snapshot_every_behind(
    start_daemon: Callable, controller: Controller
) -> None:
    daemon = start_daemon("dcs", "--controller", controller.address)
    run = Run(daemon, snapshot_every=1)
    run.make_version()
    with a_disk_that_hangs(run, 1):
        run.make_version()
        later = threading.Thread(target=run.make_version)
        later.start()
        wait_for(
            lambda: "version 2 may be at most snapshot_every = 1 ahead of the recovery copy" in controller.waits_for
        )
        assert run.client.head().head == PolicyVersion(0, 1)
    later.join(30)
    assert run.client.head().head == PolicyVersion(0, 2)
    run.wait_for_copy(2)
    wait_for(lambda: controller.waits_for == "")


def test_a_version_waits_by_name_for_memory_that_a_slow_copy_holds(
    start_daemon: Callable, controller: Controller
) -> None:
    daemon = start_daemon("dcs", "--controller", controller.address)
    run = Run(daemon, memory_budget_bytes=3 * 2 * len(STATE % 1) - 1000, snapshot_every=8)
    reasons: list[str] = []
    run.client.close()
    run.client = DcsClient(daemon.address, RUN, on_wait=reasons.append)
    run.make_version()
    with a_disk_that_hangs(run, 1):
        for _ in range(2):
            run.make_version()
        later = threading.Thread(target=run.make_version)
        later.start()
        wait_for(lambda: "held until the recovery copy is written" in controller.waits_for)
        wait_for(lambda: reasons)
        assert "held until the recovery copy is written" in reasons[0]
        assert run.client.head().head == PolicyVersion(0, 2)
    later.join(30)
    assert run.client.head().head == PolicyVersion(0, 3)
    run.wait_for_copy(3)
    wait_for(lambda: controller.waits_for == "")


def _announced(run: Run) -> int:
    records = list(run.client.watch_log(0, 0.3))
    return max((record.snapshot.version.number for record in records if record.HasField("snapshot")), default=0)


def test_a_full_disk_under_the_log_is_a_wait_and_nothing_is_lost_or_done_twice(start_daemon: Callable) -> None:
    daemon = start_daemon("dcs")
    run = Run(daemon, recovery_on_disk=False)
    version = PolicyVersion(0, 0)
    attempt = run.client.begin("actor", version, 1)
    run.client.push(version, attempt, 1, weights(1))
    # The log is longer than what the daemon has said so far, which goes to a file too.
    first = dcs_pb2.CommitRecord(version=version.to_proto(), term=1, attempt=attempt, groups=["x" * 50_000])
    run.client.commit(first)
    version = PolicyVersion(0, 1)
    attempt = run.client.begin("actor", version, 1)
    run.client.push(version, attempt, 1, weights(1))
    log = daemon.folder / "state" / "runs" / f"{RUN}.log"
    limit_files(daemon, log.stat().st_size + 4)
    size = log.stat().st_size
    record = dcs_pb2.CommitRecord(version=version.to_proto(), term=1, attempt=attempt, step=0)
    stored: list[dcs_pb2.CommitRecord] = []
    waiter = threading.Thread(target=lambda: stored.append(run.client.commit(record)))
    waiter.start()
    wait_for(lambda: "disk_full" in daemon.log)
    assert "waits for room on the disk" in daemon.log
    assert log.stat().st_size == size, "half a frame is no frame"
    assert run.client.head().head == PolicyVersion(0, 0), "memory does not change before the disk"
    limit_files(daemon, resource.RLIM_INFINITY)
    waiter.join(30)
    assert stored[0].attempt == attempt
    daemon.kill()
    daemon.restart()
    kinds = [each.WhichOneof("record") for each in run.client.watch_log(0, 0.5)]
    assert kinds == ["commit", "commit"]


def test_memory_does_not_grow_by_whole_commit_records(start_daemon: Callable) -> None:
    daemon = start_daemon("dcs")
    run = Run(daemon, recovery_on_disk=False, snapshot_every=10_000)
    groups = [f"{n:0100d}" for n in range(200)]

    def make(count: int) -> None:
        for _ in range(count):
            version = run.client.head().next_version()
            attempt = run.client.begin("actor", version, 1)
            run.client.push(version, attempt, 1, weights(1))
            record = dcs_pb2.CommitRecord(version=version.to_proto(), term=1, attempt=attempt, groups=groups)
            run.client.commit(record)

    def resident_bytes() -> int:
        return int(Path(f"/proc/{daemon.process.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    make(100)
    before = resident_bytes()
    make(500)  # 10 MB of records
    assert resident_bytes() - before < 4 << 20
    assert [record.commit.groups[0] for record in run.client.watch_log(598, 0.5)] == [groups[0]] * 2
