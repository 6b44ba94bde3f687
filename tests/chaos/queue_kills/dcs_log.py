"""A dcs that has nothing but its log: the commit point of the campaign's steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc

from relax.common.v1 import common_pb2
from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc


class DcsLog(dcs_pb2_grpc.DcsServiceServicer):
    """Serves WatchLog from a list; it never dies, its followers do."""

    def __init__(self) -> None:
        self._records: list[dcs_pb2.LogRecord] = []
        self._grown = threading.Condition()
        self._server = grpc.server(futures.ThreadPoolExecutor(16))
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
            for record in fresh:
                at += 1
                yield dcs_pb2.WatchLogResponse(record=record)

    def _append(self, **record: Any) -> None:
        with self._grown:
            self._records.append(dcs_pb2.LogRecord(revision=len(self._records) + 1, **record))
            self._grown.notify_all()

    def commit(self, number: int, groups: tuple[str, ...] = (), digest: str = "") -> None:
        version = common_pb2.PolicyVersion(number=number)
        step = number - 1 if number else None
        self._append(commit=dcs_pb2.CommitRecord(step=step, version=version, groups=groups, plan_digest=digest, term=1))
        self.head = number

    def confirm(self, server: str, term: int, number: int) -> None:
        version = common_pb2.PolicyVersion(number=number)
        self._append(confirmed=dcs_pb2.ConfirmedRecord(server=server, term=term, version=version))

    def snapshot(self, number: int) -> None:
        self._append(snapshot=dcs_pb2.SnapshotRecord(version=common_pb2.PolicyVersion(number=number)))
