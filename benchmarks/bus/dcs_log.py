"""A commit log for benchmarks: the broker follows it as it follows that of the weight service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc

from relax.common.v1 import common_pb2
from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc


class DcsLog(dcs_pb2_grpc.DcsServiceServicer):
    """Serves WatchLog from a list."""

    def __init__(self) -> None:
        self._records: list[dcs_pb2.LogRecord] = []
        self._grown = threading.Condition()
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        dcs_pb2_grpc.add_DcsServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None)

    def WatchLog(self, request: dcs_pb2.WatchLogRequest, context: Any) -> Iterator[dcs_pb2.WatchLogResponse]:
        at = request.after_revision
        while context.is_active():
            with self._grown:
                if len(self._records) <= at:
                    self._grown.wait(timeout=1.0)
                fresh = self._records[at:]
            at += len(fresh)
            for record in fresh:
                yield dcs_pb2.WatchLogResponse(record=record)

    def clear(self) -> None:
        """Another run begins its own log."""
        with self._grown:
            self._records = []

    def _append(self, **record: Any) -> int:
        with self._grown:
            self._records.append(dcs_pb2.LogRecord(revision=len(self._records) + 1, **record))
            self._grown.notify_all()
            return len(self._records)

    def commit(self, number: int, groups: tuple[str, ...] = (), digest: str = "") -> None:
        """Version `number` is there and served."""
        version = common_pb2.PolicyVersion(number=number)
        step = number - 1 if number else None
        self._append(commit=dcs_pb2.CommitRecord(step=step, version=version, groups=groups, plan_digest=digest, term=1))
        self._append(confirmed=dcs_pb2.ConfirmedRecord(server="bench", term=1, version=version))
        if number:
            self._append(snapshot=dcs_pb2.SnapshotRecord(version=version))
