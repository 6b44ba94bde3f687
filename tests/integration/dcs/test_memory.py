"""Weights and states between processes of one host: mapped, not sent; and sent where mapping is impossible."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dcs.client import DcsClient, SliceData
from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc
from relax_common.errors import DataLoss
from relax_common.rpc.channels import sync_channel
from relax_common.storage.sealed_memory import MemoryWriter, Place, SealedMemory, host_id, open_sealed, sealed
from relax_common.versions import PolicyVersion

RUN = "r"
BOTH, SENT = ("sealed", "stream"), ("stream",)


@pytest.fixture
def daemon(start_daemon: Callable) -> Iterator[object]:
    started = start_daemon("dcs")
    dcs_pb2_grpc.DcsServiceStub(sync_channel(started.address)).OpenRun(
        dcs_pb2.OpenRunRequest(run=RUN, memory_budget_bytes=1 << 20, snapshot_every=1, snapshot_ranks={"actor": 1}),
        timeout=10,
    )
    return started


def slices(fill: int) -> list[SliceData]:
    return [SliceData("w", (4, 2), (start, 0), (2, 2), "F32", bytes([fill + start]) * 16) for start in (0, 2)]


def make_version(client: DcsClient, fill: int) -> PolicyVersion:
    client.register_term("actor", 1)
    version = client.head().next_version()
    attempt = client.begin("actor", version, 1)
    client.push(version, attempt, 1, slices(fill))
    if version.number:
        client.put_snapshot(version, attempt, "actor", 0, 1, [b"state %02d" % fill])
    step = version.number - 1 if version.number else None
    client.commit(dcs_pb2.CommitRecord(version=version.to_proto(), term=1, attempt=attempt, step=step))
    return version


@pytest.mark.parametrize("pusher_shares", [True, False])
@pytest.mark.parametrize("puller_shares", [True, False])
def test_a_version_is_the_same_however_it_came_and_went(
    daemon: object, pusher_shares: bool, puller_shares: bool
) -> None:
    pusher = DcsClient(daemon.address, RUN, transports=BOTH if pusher_shares else SENT)
    puller = DcsClient(daemon.address, RUN, transports=BOTH if puller_shares else SENT)
    make_version(pusher, 1)
    version = make_version(pusher, 5)
    pulled = puller.pull(version)
    assert [bytes(data) for _, data in pulled] == [b"\5" * 16, b"\7" * 16]
    assert all(isinstance(data.obj, mmap.mmap) == puller_shares for _, data in pulled)
    assert puller.get_snapshot(version, "actor", 0) == b"state 05"


def test_mapped_weights_outlive_the_daemon(daemon: object) -> None:
    client = DcsClient(daemon.address, RUN)
    version = make_version(client, 1)
    pulled = client.pull(version)
    daemon.kill()
    assert [bytes(data) for _, data in pulled] == [b"\1" * 16, b"\3" * 16]


def test_what_one_reader_writes_no_other_sees(daemon: object) -> None:
    client = DcsClient(daemon.address, RUN)
    version = make_version(client, 1)
    mine, others = client.pull(version), client.pull(version)
    mine[0][1][0] = 9
    assert mine[0][1][0] == 9
    assert bytes(others[0][1]) == bytes(client.pull(version)[0][1]) == b"\1" * 16


def test_versions_that_were_dropped_leave_no_descriptor_and_no_bytes(daemon: object) -> None:
    client = DcsClient(daemon.address, RUN)

    def held() -> tuple[int, int]:
        return len(os.listdir(f"/proc/{daemon.process.pid}/fd")), client.head_message().memory_bytes

    for fill in range(4):
        make_version(client, fill)
    before = held()
    for fill in range(4, 12):
        make_version(client, fill)
    assert held() == before


def test_memory_of_another_host_is_sent_instead(daemon: object) -> None:
    client, reader = DcsClient(daemon.address, RUN), DcsClient(daemon.address, RUN)
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.setattr("relax_common.storage.sealed_memory.host_id", lambda: "another kernel:1")
        version = make_version(client, 1)
        reader.pull(version)
    pulled = reader.pull(version)  # tried once per client
    assert [bytes(data) for _, data in pulled] == [b"\1" * 16, b"\3" * 16]
    assert not any(isinstance(data.obj, mmap.mmap) for _, data in pulled)


def test_mapped_bytes_that_do_not_match_their_hash_are_refused(daemon: object, monkeypatch: pytest.MonkeyPatch) -> None:
    client = DcsClient(daemon.address, RUN)
    client.register_term("actor", 1)
    attempt = client.begin("actor", PolicyVersion(0, 0), 1)
    monkeypatch.setattr("dcs.transport.sealed.sealed", lambda parts: sealed([bytes(32)]))
    with pytest.raises(DataLoss, match="do not match their hash"):
        client.push(PolicyVersion(0, 0), attempt, 1, slices(1))


def test_sealed_memory_cannot_be_changed_by_anybody() -> None:
    memory = sealed([b"abc", b"", bytearray(b"de")])
    assert bytes(memory.view) == b"abcde"
    mine = os.open(f"/proc/self/fd/{memory.place().fd}", os.O_RDWR)
    memory.private[0] = 0
    assert os.pread(mine, 5, 0) == b"abcde"
    with pytest.raises(PermissionError):
        os.pwrite(mine, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(mine, 1)
    os.close(mine)


def test_memory_that_can_still_change_is_not_mapped(tmp_path: Path) -> None:
    open_one = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.write(open_one, b"abc")
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    for fd, why in ((open_one, "is not sealed"), (plain, "Invalid argument")):
        place = Place(host_id(), os.getpid(), fd, 3)
        with pytest.raises(OSError, match=why):
            open_sealed(place)
    fcntl.fcntl(open_one, fcntl.F_ADD_SEALS, 15)
    place = Place(host_id(), os.getpid(), open_one, 4)
    with pytest.raises(OSError, match="4 bytes were announced"):
        open_sealed(place)
    os.close(open_one)
    os.close(plain)


def test_memory_that_was_given_up_closes_its_descriptor() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    writer = MemoryWriter()
    writer.write(b"abc")
    del writer
    memory: SealedMemory | None = sealed([b"abc"])
    assert memory is not None
    view = memory.view
    memory = None
    assert bytes(view) == b"abc"
    del view
    assert descriptors() == before
