"""A committed version at dcs, as a transport fetches it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from relax.dcs.v1 import dcs_pb2, dcs_pb2_grpc
from relax_common.rpc.channels import call_with_retry
from relax_common.versions import PolicyVersion

BULK_SECONDS = 600.0
"""Deadline of one transfer of weights or state."""


class VersionSource:
    """Implements dcs.transport.Source over the stub of one client."""

    def __init__(
        self,
        stub: dcs_pb2_grpc.DcsServiceStub,
        run: str,
        version: PolicyVersion,
        list_version: Callable[[], dcs_pb2.GetManifestResponse],
        retry_seconds: float,
    ) -> None:
        self._stub = stub
        self._run = run
        self._version = version
        self._list_version = list_version
        self._retry_seconds = retry_seconds

    @cached_property
    def _listed(self) -> dcs_pb2.GetManifestResponse:
        return self._list_version()

    @property
    def entries(self) -> Sequence[dcs_pb2.Slice]:
        return self._listed.slices

    @property
    def places(self) -> Sequence[bytes]:
        return [handover.place for handover in self._listed.handovers]

    @property
    def offsets(self) -> Sequence[dcs_pb2.MemoryOffset]:
        return self._listed.offsets

    def stream(self, offset: int) -> Iterator[bytes]:
        request = dcs_pb2.PullSlicesRequest(run=self._run, version=self._version.to_proto(), offset=offset)
        stream = self._stub.PullSlices(request, timeout=BULK_SECONDS)
        try:
            for frame in stream:
                yield frame.chunk
        finally:
            stream.cancel()  # ends nothing where all has arrived

    def retry(self, call: Callable[[], None]) -> None:
        call_with_retry(
            lambda _: call(), what=f"dcs to send version {self._version}", deadline_seconds=self._retry_seconds
        )
