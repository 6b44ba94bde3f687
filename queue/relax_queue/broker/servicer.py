"""The service: each method checks its message, runs one command or one wait, and answers."""

import time
from collections.abc import AsyncIterator
from functools import partial

from relax.queue.v1 import queue_pb2 as pb
from relax.queue.v1 import queue_pb2_grpc
from relax_common.errors import DeadlineExceeded, Precondition, RunEnded, UnknownBlob
from relax_common.rows import PRODUCER
from relax_common.rpc.calls import ServicerContext
from relax_common.versions import PolicyVersion
from relax_queue.broker import messages
from relax_queue.broker.metrics import LEASE_REFUSALS
from relax_queue.broker.payload_calls import PayloadCalls
from relax_queue.broker.public_events import messages_after
from relax_queue.broker.run_broker import RunBroker
from relax_queue.broker.waits import wait_end
from relax_queue.rows.column_block import encode
from relax_queue.rules import events as ev
from relax_queue.rules import lifecycle, reading
from relax_queue.rules.group import Group, Status
from relax_queue.rules.leases import Refused, grant_some, holds
from relax_queue.rules.transaction import fence

RELAXD = "relaxd"
"""Holder of the term that fences offers."""


class QueueServicer(PayloadCalls, queue_pb2_grpc.QueueServiceServicer):
    """Implements relax.queue.v1.QueueService over a broker."""

    async def OpenRun(self, request: pb.OpenRunRequest, context: ServicerContext) -> pb.OpenRunResponse:
        spec = messages.spec_from(request.spec)
        await self._broker.open(ev.RunOpened(request.run, request.recipe_digest, spec, request.dcs_address))
        return pb.OpenRunResponse(bytes_per_group=spec.bytes_per_group, bytes_needed=spec.bytes_needed)

    async def SealRun(self, request: pb.SealRunRequest, context: ServicerContext) -> pb.SealRunResponse:
        await self._broker.run(request.run).transact(lifecycle.seal, reserve=True)
        return pb.SealRunResponse()

    async def EndRun(self, request: pb.EndRunRequest, context: ServicerContext) -> pb.EndRunResponse:
        run = self._broker.run(request.run)
        await run.transact(lifecycle.end, reserve=True)
        return pb.EndRunResponse(counts=messages.counts_to(run.state))

    async def RegisterTerm(self, request: pb.RegisterTermRequest, context: ServicerContext) -> pb.RegisterTermResponse:
        run = self._broker.run(request.run)
        await run.transact(lambda d: fence(d, request.holder, request.term), reserve=True)
        return pb.RegisterTermResponse(term=run.state.terms.of(request.holder))

    async def OfferGroups(self, request: pb.OfferGroupsRequest, context: ServicerContext) -> pb.OfferGroupsResponse:
        run = self._broker.run(request.run)
        prompts = [messages.prompt_from(g) for g in request.groups]
        for prompt in prompts:
            absent = [b for b in prompt.blobs if not run.blobs.has(b)]
            if absent:
                raise UnknownBlob(f"group {prompt.group} refers to blob {absent[0]}: put it first")
        await self._applied(run, request.after_dcs_revision, "OfferGroups", RELAXD, context)
        fresh, known = await run.transact(
            lambda d: lifecycle.offer(d, RELAXD, request.term, prompts, request.after_dcs_revision)
        )
        return pb.OfferGroupsResponse(accepted=fresh, known=known)

    async def _applied(self, run: RunBroker, revision: int, call: str, who: str, context: ServicerContext) -> None:
        await run.waits.until(
            call,
            who,
            lambda: True if run.state.applied_revision >= revision else None,
            lambda: f"record {revision} of the dcs log; {run.state.applied_revision} is applied",
            wait_end(context),
        )

    async def LeaseGroups(
        self, request: pb.LeaseGroupsRequest, context: ServicerContext
    ) -> AsyncIterator[pb.LeaseGroupsResponse]:
        run = self._broker.run(request.run)
        end = wait_end(context)
        granted = 0
        while granted < request.credits:
            try:
                groups = await self._grant(run, request, request.credits - granted, end)
            except DeadlineExceeded:
                if granted:
                    return
                raise
            granted += len(groups)
            for group in groups:
                yield self._lease(run, group)

    async def _grant(self, run: RunBroker, request: pb.LeaseGroupsRequest, credits: int, end: float) -> list[Group]:
        """Returns at least one lease. Waits, and tries again whenever the run changes; the wait names the last
        refusal."""
        refused = Refused("start", "a lease")
        while True:
            seen = run.journal.revision
            result = await run.transact(lambda d: grant_some(d, request.server, request.term, credits))
            if not isinstance(result, Refused):
                return result
            if run.ended:
                raise RunEnded(f"run {request.run} has ended")
            if result.reason != refused.reason:
                LEASE_REFUSALS.labels(request.run, result.reason).inc()
            refused = result
            await run.waits.until(
                "LeaseGroups",
                request.server,
                partial(_changed, run, seen),
                partial(str, refused.message),
                end,
            )

    def _lease(self, run: RunBroker, group: Group) -> pb.LeaseGroupsResponse:
        message = pb.LeaseGroupsResponse(
            group=messages.prompt_to(group.prompt),
            attempt=group.attempts,
            samples=run.state.spec.samples_per_prompt,
            deadline_version=group.deadline,
            confirmed=PolicyVersion.unpack(group.confirmed).to_proto(),
            ttl_seconds=run.state.spec.lease_ttl_seconds,
        )
        keys = group.rows.keys
        if keys:
            fields = [f.name for f in run.state.spec.written_by(PRODUCER)]
            message.kept.rows.extend(messages.keys_to(keys))
            message.kept.block = encode(run.payload.gather(run.state, keys, fields))
        return message

    async def RenewLeases(self, request: pb.RenewLeasesRequest, context: ServicerContext) -> pb.RenewLeasesResponse:
        run = self._broker.run(request.run)
        run.state.terms.check(request.server, request.term)
        gone = []
        for lease in request.leases:
            if holds(run.state.groups.get(lease.group), request.server, request.term, lease.attempt):
                run.timers.extend((lease.group, lease.attempt))
            else:
                gone.append(lease)
        others = self._others(run, request) if request.list_others else []
        return pb.RenewLeasesResponse(gone=gone, others=others)

    def _others(self, run: RunBroker, request: pb.RenewLeasesRequest) -> list[pb.LeaseKey]:
        named = {lease.group for lease in request.leases}
        held = [g for g in run.state.where(Status.LEASED) if (g.server, g.term) == (request.server, request.term)]
        return [pb.LeaseKey(group=g.id, attempt=g.attempts) for g in held if g.id not in named]

    async def GetPlan(self, request: pb.GetPlanRequest, context: ServicerContext) -> pb.GetPlanResponse:
        run = self._broker.run(request.run)
        state = run.state
        reading.consumer(state, request.consumer)
        await run.transact(lambda d: fence(d, request.consumer, request.term), reserve=True)

        def find() -> reading.PlanAnswer | None:
            state.terms.check(request.consumer, request.term)
            return reading.find_plan(state, request.lineage, request.step, request.chunk, request.generation)

        answer = await run.waits.until(
            "GetPlan",
            request.consumer,
            find,
            lambda: reading.plan_missing(state, request.lineage, request.step),
            wait_end(context),
            lambda: [(request.consumer, "plan")],
            # Everything in the request that `find` depends on.
            (request.consumer, request.term, request.lineage, request.step, request.chunk, request.generation),
        )
        await run.sync()  # I7: a plan is durable before anyone reads rows by it
        return messages.plan_to(answer.plan, answer.chunk, answer.close)

    async def GetStatus(self, request: pb.GetStatusRequest, context: ServicerContext) -> pb.GetStatusResponse:
        runs = [self._broker.run(request.run)] if request.run else self._broker.runs()
        return pb.GetStatusResponse(runs=[self._status(run) for run in runs])

    def _status(self, run: RunBroker) -> pb.RunStatus:
        now = time.monotonic()
        waits = [
            pb.Wait(who=f"{w.call} of {w.who}", what=w.what(), seconds=now - w.since)
            for w in run.waits.in_progress()
            if w.call != "WatchEvents"
        ]
        full = run.disk_wait()
        if full is not None:
            waits.append(pb.Wait(who="the queue", what=f"room: {full[0]}", seconds=now - full[1]))
        message = messages.status_to(run.state, waits)
        message.oldest_lease_seconds = run.timers.oldest_lease_seconds
        message.log_bytes, message.snapshot_bytes = run.journal.log_bytes, run.journal.snapshot_bytes
        message.payload_disk_bytes = run.files.disk_bytes if run.files else 0
        return message

    async def ListPartitions(
        self, request: pb.ListPartitionsRequest, context: ServicerContext
    ) -> pb.ListPartitionsResponse:
        state = self._broker.run(request.run).state
        plans = [state.kept[step] for step in sorted(state.kept)] + ([state.plan] if state.plan else [])
        return pb.ListPartitionsResponse(partitions=[messages.partition_to(state, plan) for plan in plans])

    async def Inspect(self, request: pb.InspectRequest, context: ServicerContext) -> pb.InspectResponse:
        state = self._broker.run(request.run).state
        finished = state.finished.get(request.group)
        return messages.finished_to(finished) if finished else messages.inspect_to(state, state.group(request.group))

    async def WatchEvents(
        self, request: pb.WatchEventsRequest, context: ServicerContext
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        run = self._broker.run(request.run)
        seen = request.after_revision
        if seen > run.journal.revision:
            raise Precondition(
                f"run {request.run} has {run.journal.revision} events, the watcher has seen {seen}: another queue"
            )
        while True:
            shown, seen = messages_after(run.journal, seen)
            for message in shown:
                yield message
            if run.journal.has_after(seen):
                continue
            if run.ended and run.journal.is_durable:
                return
            await run.waits.until(
                "WatchEvents",
                "a watcher",
                partial(_shows_more, run, seen),
                lambda: "new events",
                wait_end(context),
            )


def _changed(run: RunBroker, seen: int) -> bool | None:
    return run.journal.revision > seen or None


def _shows_more(run: RunBroker, seen: int) -> bool | None:
    return run.journal.has_after(seen) or (run.ended and run.journal.is_durable) or None
