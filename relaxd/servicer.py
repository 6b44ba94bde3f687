"""relax.controller.v1: thin over the controller."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from relax.controller.v1 import controller_pb2, controller_pb2_grpc
from relaxd.controller import Controller


class ControllerServicer(controller_pb2_grpc.ControllerServiceServicer):
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def CreateRun(
        self, request: controller_pb2.CreateRunRequest, context: Any
    ) -> controller_pb2.CreateRunResponse:
        run, derived = await self._controller.create_run(request)
        return controller_pb2.CreateRunResponse(run=run, derived=derived)

    async def GetRun(self, request: controller_pb2.GetRunRequest, context: Any) -> controller_pb2.GetRunResponse:
        return controller_pb2.GetRunResponse(run=self._controller.run(request.run))

    async def ListRuns(self, request: controller_pb2.ListRunsRequest, context: Any) -> controller_pb2.ListRunsResponse:
        runs, token = self._controller.list_runs(request.page_size or 100, request.page_token)
        return controller_pb2.ListRunsResponse(runs=runs, next_page_token=token)

    async def WatchRun(
        self, request: controller_pb2.WatchRunRequest, context: Any
    ) -> AsyncIterator[controller_pb2.WatchRunResponse]:
        async for run in self._controller.watch_run(request.run):
            yield controller_pb2.WatchRunResponse(run=run)

    async def StopRun(self, request: controller_pb2.StopRunRequest, context: Any) -> controller_pb2.StopRunResponse:
        return controller_pb2.StopRunResponse(run=await self._controller.stop_run(request.run))

    async def ResumeRun(
        self, request: controller_pb2.ResumeRunRequest, context: Any
    ) -> controller_pb2.ResumeRunResponse:
        return controller_pb2.ResumeRunResponse(run=await self._controller.resume_run(request.run))

    async def Register(self, request: controller_pb2.RegisterRequest, context: Any) -> controller_pb2.RegisterResponse:
        return await self._controller.register(request)

    async def Heartbeat(
        self, request: controller_pb2.HeartbeatRequest, context: Any
    ) -> controller_pb2.HeartbeatResponse:
        return controller_pb2.HeartbeatResponse(drain=self._controller.registry.beat(request))

    async def ListDaemons(
        self, request: controller_pb2.ListDaemonsRequest, context: Any
    ) -> controller_pb2.ListDaemonsResponse:
        daemons = sorted(self._controller.registry.daemons.items())
        return controller_pb2.ListDaemonsResponse(daemons=[daemon for _, daemon in daemons])

    async def ReportHeadLost(
        self, request: controller_pb2.ReportHeadLostRequest, context: Any
    ) -> controller_pb2.ReportHeadLostResponse:
        return controller_pb2.ReportHeadLostResponse(head=await self._controller.report_head_lost(request))

    async def WatchEvents(
        self, request: controller_pb2.WatchEventsRequest, context: Any
    ) -> AsyncIterator[controller_pb2.WatchEventsResponse]:
        async for event in self._controller.watch_events(request.after_revision):
            yield event
