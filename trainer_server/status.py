"""What the training thread reports to the event loop and relaxd, and the requests (pause, stop) it gets from there."""

import threading
from dataclasses import dataclass, field

from relax.controller.v1 import controller_pb2, controller_pb2_grpc
from relax_common.errors import NotFound
from relax_common.rpc.channels import call_with_retry, sync_channel
from relax_common.versions import PolicyVersion


@dataclass
class RoleStatus:
    """Written by the training thread, read by the server. The two events go the other way."""

    run: str = ""
    term: int = 0
    step: int = 0
    phase: str = "load"
    version: PolicyVersion = field(default_factory=lambda: PolicyVersion(0, 0))
    waits_for: str = ""
    pause: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)

    def wait_for(self, what: str) -> None:
        """Set what the role waits for, within its current phase."""
        self.waits_for = what

    def enter(self, phase: str, waits_for: str = "") -> None:
        self.phase = phase
        self.waits_for = waits_for


_REPORT_SECONDS = 300.0


class HeadReporter:
    """Only relaxd appends ROLLBACK; this class asks it to."""

    def __init__(self, controller: str, run: str, instance: str, term: int) -> None:
        self._stub = controller_pb2_grpc.ControllerServiceStub(sync_channel(controller))
        self._controller = controller
        self._run = run
        self._instance = instance
        self._term = term

    def report(self, head: PolicyVersion | None, reason: str) -> bytes:
        """Report that the head cannot be rebuilt. Returns the head after the rollback, serialized."""
        if head is None:
            raise NotFound("there is no head that could be lost")
        request = controller_pb2.ReportHeadLostRequest(
            run=self._run, instance=self._instance, term=self._term, head=head.to_proto(), reason=reason
        )
        response: controller_pb2.ReportHeadLostResponse = call_with_retry(
            lambda seconds: self._stub.ReportHeadLost(request, timeout=seconds),
            what=f"relaxd {self._controller} to roll the run back",
            deadline_seconds=_REPORT_SECONDS,
        )
        return response.head.SerializeToString()
