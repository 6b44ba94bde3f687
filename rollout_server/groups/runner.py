"""Leases groups while the server may, generates them, and ends every lease: put, returned, or lost."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Container
from contextlib import suppress
from dataclasses import dataclass

from relax.queue.v1 import queue_pb2
from relax_common.errors import DeadlineExceeded, Exhausted, NotFound, Precondition, RunEnded, StaleTerm, Unavailable
from relax_common.failpoints import failpoint
from relax_common.process.telemetry import get_logger
from relax_common.rows.prompt import Chat, from_value
from relax_queue.client import AioQueueClient, block_to, keys_of_samples
from rollout_server import metrics
from rollout_server.engines.contract import Engine, RequestRefused
from rollout_server.tokenizers import PromptError
from rollout_server.trajectory.samples import GroupVerdict, judge_group, kept_scores, no_rows, row_columns
from rollout_server.version_follower import Holder, VersionFollower
from rollout_server.workflows.base import GroupResult, GroupTask, Workflow

LEASE_SECONDS = 5.0
RETRY_SECONDS = 0.2
RENEWALS_PER_TTL = 3
OUTCOMES = {
    GroupVerdict.OK: queue_pb2.GROUP_OUTCOME_OK,
    GroupVerdict.NO_SIGNAL: queue_pb2.GROUP_OUTCOME_NO_SIGNAL,
    GroupVerdict.FAILED: queue_pb2.GROUP_OUTCOME_FAILED,
}


@dataclass(frozen=True)
class Sizes:
    """From the recipe."""

    groups_at_a_time: int
    min_valid_samples: int
    lease_ttl_seconds: float
    drops_equal_rewards: bool = True


@dataclass
class _Lease:
    """A group being generated; `gone` once the queue has taken it back."""

    granted: queue_pb2.LeaseGroupsResponse
    gone: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return self.granted.group.group, self.granted.attempt

    @property
    def request_id(self) -> str:
        return f"{self.granted.group.group}#{self.granted.attempt}"


class GroupRunner:
    """Works until it is drained. Every lease ends in exactly one way: put, returned, or lost."""

    def __init__(
        self,
        queue: AioQueueClient,
        follower: VersionFollower,
        engine: Engine,
        workflow: Workflow,
        holder: Holder,
        sizes: Sizes,
    ) -> None:
        self._queue = queue
        self._follower = follower
        self._engine = engine
        self._workflow = workflow
        self._holder = holder
        self._sizes = sizes
        self._leases: dict[tuple[str, int], _Lease] = {}
        self._lease_ended = asyncio.Event()
        self._asking: asyncio.Task[bool] | None = None
        self._groups_returned = 0
        self.tokens_generated = 0
        self.draining = False
        self.waits_for = ""

    @property
    def groups_in_flight(self) -> int:
        return len(self._leases)

    async def run(self) -> None:
        """Run until drained or the run has ended. A group that fails because of a bug or an old term ends the
        server."""
        async with asyncio.TaskGroup() as groups:
            while not self.draining:
                await self._follower.wait_for(lambda serving: serving.may_lease)
                credits = self._sizes.groups_at_a_time - len(self._leases)
                if credits < 1:
                    await self._wait_for_lease_end(LEASE_SECONDS)
                elif not await self._ask(credits, groups):
                    return

    async def _ask(self, credits: int, groups: asyncio.TaskGroup) -> bool:
        self._asking = asyncio.create_task(self._lease(credits, groups))
        try:
            await asyncio.wait({self._asking})
        finally:
            self._asking.cancel()
        return not self._asking.cancelled() and self._asking.result()

    async def renew(self) -> None:
        """Renew the leases; groups that the queue has taken back are aborted."""
        while True:
            await asyncio.sleep(self._sizes.lease_ttl_seconds / RENEWALS_PER_TTL)
            keys = list(self._leases)
            if not keys:
                continue
            try:
                gone = await self._queue.renew_leases(self._holder.server, self._holder.term, keys)
            except (DeadlineExceeded, Unavailable) as error:
                get_logger().warning("leases_not_renewed", error=error.message)
                continue
            for lease in filter(None, map(self._leases.get, gone)):
                lease.gone = True
                self._engine.abort(lease.request_id)

    async def drain(self, grace_seconds: float) -> int:
        """Take no more leases. Groups not finished after the grace period are returned to the queue; returns their
        number."""
        self.draining = True
        returned_before = self._groups_returned
        end = time.monotonic() + grace_seconds
        await self._give_back_lost_grants()
        while self._leases and time.monotonic() < end:
            await self._wait_for_lease_end(end - time.monotonic())
        while self._leases:
            for lease in self._leases.values():
                self._engine.abort(lease.request_id)
            await self._wait_for_lease_end(LEASE_SECONDS)
        return self._groups_returned - returned_before

    async def _give_back_lost_grants(self) -> None:
        """Return grants that were on their way when this server stopped listening."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})
        try:
            lost = await self._queue.lost_grants(
                self._holder.server, self._holder.term, list(self._leases), LEASE_SECONDS
            )
        except (DeadlineExceeded, Unavailable, StaleTerm, NotFound) as error:
            get_logger().warning("lost_grants_not_known", error=error.message)
            return  # they run out
        for group, attempt in lost:
            granted = queue_pb2.LeaseGroupsResponse(group=queue_pb2.PromptGroup(group=group), attempt=attempt)
            now = time.time()
            await self._give_back(_Lease(granted), GroupResult(no_rows(), [], now, now))

    async def _wait_for_lease_end(self, timeout_seconds: float) -> None:
        self._lease_ended.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._lease_ended.wait(), timeout_seconds)

    async def _lease(self, credits: int, groups: asyncio.TaskGroup) -> bool:
        """Start what the queue grants within the deadline; False: the run has ended."""
        self.waits_for = "a group that the queue admits" if not self._leases else ""
        try:
            stream = self._queue.lease_groups(self._holder.server, self._holder.term, credits, LEASE_SECONDS)
            async for granted in stream:
                self.waits_for = ""
                lease = _Lease(granted)
                self._leases[lease.key] = lease
                groups.create_task(self._serve(lease))
        except DeadlineExceeded as error:
            self.waits_for = error.missing
        except (Unavailable, Exhausted) as error:
            self.waits_for = f"the queue: {error.message}"
            await asyncio.sleep(RETRY_SECONDS)
        except RunEnded:
            return False
        return True

    async def _serve(self, lease: _Lease) -> None:
        metrics.SAMPLES_IN_FLIGHT.inc(lease.granted.samples)
        try:
            outcome = await self._answer(lease)
        finally:
            metrics.SAMPLES_IN_FLIGHT.dec(lease.granted.samples)
            self._leases.pop(lease.key)
            self._lease_ended.set()
        metrics.GROUPS.labels(outcome).inc()

    async def _answer(self, lease: _Lease) -> str:
        """How the lease ended, as a word for the metric."""
        kept = kept_scores(lease.granted.kept)
        try:
            result = await self._workflow.run(_task(lease, kept))
        except (PromptError, RequestRefused) as error:
            now = time.time()
            return await self._put(lease, GroupResult(no_rows(), [], now, now), GroupVerdict.FAILED, str(error))
        self._observe(result)
        if result.reward_reasons:
            get_logger().warning(
                "rewards_not_valid",
                group=lease.key[0],
                samples=len(result.reward_reasons),
                reason=result.reward_reasons[0],
            )
        if len(kept) + len(result.rows) < lease.granted.samples:
            return await self._give_back(lease, result)
        scores = [*kept.values(), *result.rows.scored()]
        verdict, reason = judge_group(scores, self._sizes.min_valid_samples, self._sizes.drops_equal_rewards)
        if verdict is GroupVerdict.FAILED:
            reason = "; ".join([reason, *result.reward_reasons[:1]])
        return await self._put(lease, result, verdict, reason)

    async def _put(self, lease: _Lease, result: GroupResult, verdict: GroupVerdict, reason: str) -> str:
        failpoint("rollout.before_put")
        header, columns = self._header(lease, result), row_columns(result.rows)
        header.completes_group, header.reason = OUTCOMES[verdict], reason
        ended = await self._until_answered(lease, lambda: self._queue.put(header, columns))
        return verdict.value if ended else "lost"

    async def _give_back(self, lease: _Lease, result: GroupResult) -> str:
        header, columns = self._header(lease, result), row_columns(result.rows)
        ended = await self._until_answered(lease, lambda: self._queue.return_group(header, columns))
        self._groups_returned += ended
        return "returned" if ended else "lost"

    def _header(self, lease: _Lease, result: GroupResult) -> queue_pb2.PutHeader:
        """A single-turn sample has one segment."""
        group, attempt = lease.key
        return queue_pb2.PutHeader(
            run=self._queue.run,
            server=self._holder.server,
            term=self._holder.term,
            lease=queue_pb2.LeaseKey(group=group, attempt=attempt),
            rows=block_to(keys_of_samples(group, result.rows.samples)),
            generation_start_unix_seconds=result.generation_start_unix_seconds,
            generation_end_unix_seconds=result.generation_end_unix_seconds,
        )

    async def _until_answered(self, lease: _Lease, call: Callable[[], Awaitable[object]]) -> bool:
        """Repeat the call, which is idempotent, until the queue answers or the lease is gone (then False)."""
        while not lease.gone:
            try:
                await call()
                return True
            except StaleTerm:
                raise
            except Precondition as error:
                get_logger().info("lease_gone", group=lease.key[0], error=error.message)
                return False
            except (DeadlineExceeded, Unavailable, Exhausted) as error:
                self.waits_for = f"the queue to take group {lease.key[0]}: {error.message}"
                await asyncio.sleep(RETRY_SECONDS)
        return False

    def _observe(self, result: GroupResult) -> None:
        seconds = result.generation_end_unix_seconds - result.generation_start_unix_seconds
        metrics.GENERATION_SECONDS.observe(max(0.0, seconds))
        metrics.TOKENS.inc(result.rows.n_sampled)
        self.tokens_generated += result.rows.n_sampled
        for status, count in Counter(result.rows.statuses.tolist()).items():
            metrics.REWARDS_BY_STATUS[status].inc(count)


def _prompt(prompt_json: str) -> str | Chat:
    try:
        return from_value(json.loads(prompt_json))
    except ValueError as error:
        raise PromptError(str(error)) from error


def _task(lease: _Lease, kept_samples: Container[int]) -> GroupTask:
    group = lease.granted.group
    return GroupTask(
        group=group.group,
        request_id=lease.request_id,
        prompt=_prompt(group.prompt_json),
        label=group.label if group.HasField("label") else None,
        metadata=json.loads(group.metadata_json or "{}"),
        samples=[sample for sample in range(lease.granted.samples) if sample not in kept_samples],
    )
