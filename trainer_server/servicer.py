"""relax.trainer.v1, served by rank 0."""

from relax.common.v1 import common_pb2
from relax.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from relax_common.rpc.calls import ServicerContext
from trainer_server.status import RoleStatus


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    def __init__(self, status: RoleStatus, identity: common_pb2.Identity, world_size: int) -> None:
        self._status = status
        self._identity = identity
        self._world_size = world_size

    async def GetStatus(
        self, request: trainer_pb2.GetStatusRequest, context: ServicerContext
    ) -> trainer_pb2.GetStatusResponse:
        status = self._status
        return trainer_pb2.GetStatusResponse(
            identity=self._identity,
            run=status.run,
            term=status.term,
            step=status.step,
            phase=status.phase,
            version=status.version.to_proto(),
            waits_for=status.waits_for,
            world_size=self._world_size,
        )

    async def Pause(self, request: trainer_pb2.PauseRequest, context: ServicerContext) -> trainer_pb2.PauseResponse:
        self._status.pause.set()
        return trainer_pb2.PauseResponse()

    async def Resume(self, request: trainer_pb2.ResumeRequest, context: ServicerContext) -> trainer_pb2.ResumeResponse:
        self._status.pause.clear()
        return trainer_pb2.ResumeResponse()

    async def Stop(self, request: trainer_pb2.StopRequest, context: ServicerContext) -> trainer_pb2.StopResponse:
        self._status.stop.set()
        return trainer_pb2.StopResponse()
