"""The one thing that the training thread tells relaxd."""

from relax.controller.v1 import controller_pb2, controller_pb2_grpc
from relax_common.errors import NotFound
from relax_common.rpc.channels import call_with_retry, sync_channel
from relax_common.versions import PolicyVersion

_REPORT_SECONDS = 300.0


class HeadReporter:
    """relaxd alone appends ROLLBACK; this asks for it."""

    def __init__(self, controller: str, run: str, instance: str, term: int) -> None:
        self._stub = controller_pb2_grpc.ControllerServiceStub(sync_channel(controller))
        self._controller = controller
        self._run = run
        self._instance = instance
        self._term = term

    def report(self, head: PolicyVersion | None, reason: str) -> bytes:
        """The head cannot be rebuilt. Returns the head after the rollback, serialized."""
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
