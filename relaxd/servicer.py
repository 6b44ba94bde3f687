"""relax.controller.v1: a thin layer over the controller."""

from __future__ import annotations

from collections.abc import AsyncIterator

from relax.controller.v1 import controller_pb2, controller_pb2_grpc
from relax_common.rpc.calls import ServicerContext
from relaxd.controller import Controller

PAGE_RUNS = 100


class ControllerServicer(controller_pb2_grpc.ControllerServiceServicer):
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def CreateRun(
        self, request: controller_pb2.CreateRunRequest, context: ServicerContext
    ) -> controller_pb2.CreateRunResponse:
        run, derived = await self._controller.create_run(request)
        return controller_pb2.CreateRunResponse(run=run.to_proto(), derived=derived)

    async def GetRun(
        self, request: controller_pb2.GetRunRequest, context: ServicerContext
    ) -> controller_pb2.GetRunResponse:
        return controller_pb2.GetRunResponse(run=self._controller.run(request.run).record.to_proto())

    async def ListRuns(
        self, request: controller_pb2.ListRunsRequest, context: ServicerContext
    ) -> controller_pb2.ListRunsResponse:
        runs, token = self._controller.list_runs(request.page_size or PAGE_RUNS, request.page_token)
        return controller_pb2.ListRunsResponse(runs=[run.to_proto() for run in runs], next_page_token=token)

    async def WatchRun(
        self, request: controller_pb2.WatchRunRequest, context: ServicerContext
    ) -> AsyncIterator[controller_pb2.WatchRunResponse]:
        async for run in self._controller.run(request.run).watch():
            yield controller_pb2.WatchRunResponse(run=run.to_proto())

    async def StopRun(
        self, request: controller_pb2.StopRunRequest, context: ServicerContext
    ) -> controller_pb2.StopRunResponse:
        return controller_pb2.StopRunResponse(run=(await self._controller.stop_run(request.run)).to_proto())

    async def ResumeRun(
        self, request: controller_pb2.ResumeRunRequest, context: ServicerContext
    ) -> controller_pb2.ResumeRunResponse:
        run = await self._controller.resume_run(request.run, request.total_steps, request.accept_changed_data)
        return controller_pb2.ResumeRunResponse(run=run.to_proto())

    async def Register(
        self, request: controller_pb2.RegisterRequest, context: ServicerContext
    ) -> controller_pb2.RegisterResponse:
        return await self._controller.register(request)

    async def Heartbeat(
        self, request: controller_pb2.HeartbeatRequest, context: ServicerContext
    ) -> controller_pb2.HeartbeatResponse:
        return controller_pb2.HeartbeatResponse(drain=self._controller.registry.beat(request))

    async def ListDaemons(
        self, request: controller_pb2.ListDaemonsRequest, context: ServicerContext
    ) -> controller_pb2.ListDaemonsResponse:
        return controller_pb2.ListDaemonsResponse(daemons=self._controller.daemons())

    async def ReportHeadLost(
        self, request: controller_pb2.ReportHeadLostRequest, context: ServicerContext
    ) -> controller_pb2.ReportHeadLostResponse:
        head = await self._controller.report_head_lost(request)
        return controller_pb2.ReportHeadLostResponse(head=head.to_proto())

    async def WatchEvents(
        self, request: controller_pb2.WatchEventsRequest, context: ServicerContext
    ) -> AsyncIterator[controller_pb2.WatchEventsResponse]:
        async for event in self._controller.watch_events(request.after_revision):
            yield event
