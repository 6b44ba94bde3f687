"""A commit log without a weight service: a broker follows it as it follows that of dcs. For benchmarks and tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc

from relax.common.v1 import common_pb2
from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc


class DcsLog(dcs_pb2_grpc.DcsServiceServicer):
    """Serves WatchLog of one run from a list. Each method appends a record and returns its revision."""

    def __init__(self, threads: int = 8) -> None:
        self._records: list[dcs_pb2.LogRecord] = []
        self._grown = threading.Condition()
        self._server = grpc.server(futures.ThreadPoolExecutor(threads))
        dcs_pb2_grpc.add_DcsServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        self.head = 0

    def stop(self) -> None:
        self._server.stop(None)

    def WatchLog(self, request: dcs_pb2.WatchLogRequest, context: Any) -> Iterator[dcs_pb2.WatchLogResponse]:
        at = request.after_revision
        while context.is_active():
            with self._grown:
                if len(self._records) <= at:
                    self._grown.wait(timeout=0.2)
                fresh = self._records[at:]
            at += len(fresh)
            for record in fresh:
                yield dcs_pb2.WatchLogResponse(record=record)

    def clear(self) -> None:
        """Another run begins its own log."""
        with self._grown:
            self._records, self.head = [], 0

    def append(self, **record: Any) -> int:
        with self._grown:
            revision = len(self._records) + 1
            self._records.append(dcs_pb2.LogRecord(revision=revision, **record))
            self._grown.notify_all()
        return revision

    def commit(self, number: int, groups: tuple[str, ...] = (), digest: str = "", lineage: int = 0) -> int:
        version = common_pb2.PolicyVersion(lineage=lineage, number=number)
        step = number - 1 if number else None
        revision = self.append(
            commit=dcs_pb2.CommitRecord(step=step, version=version, groups=groups, plan_digest=digest, term=1)
        )
        self.head = number
        return revision

    def commit_and_serve(self, server: str, number: int, groups: tuple[str, ...] = (), digest: str = "") -> None:
        """Version `number` is committed, kept and served."""
        self.commit(number, groups, digest)
        self.confirm(server, 1, number)
        if number:
            self.snapshot(number)

    def confirm(self, server: str, term: int, number: int, lineage: int = 0) -> int:
        version = common_pb2.PolicyVersion(lineage=lineage, number=number)
        return self.append(confirmed=dcs_pb2.ConfirmedRecord(server=server, term=term, version=version))

    def snapshot(self, number: int, lineage: int = 0) -> int:
        version = common_pb2.PolicyVersion(lineage=lineage, number=number)
        return self.append(snapshot=dcs_pb2.SnapshotRecord(version=version))

    def rollback(self, lineage: int, head: int) -> int:
        return self.append(rollback=dcs_pb2.RollbackRecord(lineage=lineage, head=head, reason="test"))
