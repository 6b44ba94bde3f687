"""How a lease ends: put if the group is complete, with samples kept from an earlier lease; else returned."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from relax.common.v1 import common_pb2
from relax.queue.v1 import queue_pb2
from relax_common.rows import RewardStatus
from relax_queue.client import AioQueueClient, Column, encode
from rollout_server.engines.contract import Completion, Engine, FinishReason
from rollout_server.groups.runner import GroupRunner, Sizes, _Lease
from rollout_server.rewards.outcome import RewardOutcome
from rollout_server.trajectory.samples import make_rows
from rollout_server.version_follower import Holder, VersionFollower
from rollout_server.workflows.base import GroupResult, GroupTask


class FakeQueue:
    """Remembers what it was told."""

    run = "run"

    def __init__(self) -> None:
        self.told: list[tuple[str, queue_pb2.PutHeader, int]] = []

    async def put(self, header: queue_pb2.PutHeader, columns: dict[str, Column]) -> str:
        self.told.append(("put", header, len(columns)))
        return "accepted"

    async def return_group(self, header: queue_pb2.PutHeader, columns: dict[str, Column]) -> None:
        self.told.append(("returned", header, len(columns)))


class FakeWorkflow:
    """Finishes the samples that it is told to finish, with the rewards given."""

    def __init__(self, rewards: dict[int, float]) -> None:
        self.rewards = rewards
        self.asked: list[int] = []

    async def run(self, task: GroupTask) -> GroupResult:
        self.asked = list(task.samples)
        done = [sample for sample in task.samples if sample in self.rewards]
        completion = Completion(np.array([5, 6]), np.zeros(2, np.float32), np.zeros(2, np.int64), FinishReason.STOP)
        outcomes = [RewardOutcome(RewardStatus.OK, self.rewards[sample]) for sample in done]
        return GroupResult(make_rows(done, [1, 2], [completion] * len(done), 1.0, outcomes), [], 0.0, 1.0)


def kept_samples(rewards: dict[int, float], status: RewardStatus = RewardStatus.OK) -> queue_pb2.KeptSamples:
    columns = {
        "reward": Column("sample", np.array(list(rewards.values()), np.float32)),
        "reward_status": Column("sample", np.array([status] * len(rewards), np.uint8)),
    }
    rows = [common_pb2.RowKey(group="g", sample=sample) for sample in rewards]
    return queue_pb2.KeptSamples(rows=rows, **{KEPT_FIELD: encode(columns)})


KEPT_FIELD = next(field.name for field in queue_pb2.KeptSamples.DESCRIPTOR.fields if field.name != "rows")


def answer(
    workflow: FakeWorkflow, kept: queue_pb2.KeptSamples | None = None, *, samples: int = 4, min_valid: int = 2
) -> tuple[str, queue_pb2.PutHeader]:
    """How a lease of `samples` samples ended."""
    queue = FakeQueue()
    runner = GroupRunner(
        cast(AioQueueClient, queue),
        cast(VersionFollower, None),
        cast(Engine, None),
        cast(Any, workflow),
        Holder("server", 1),
        Sizes(1, min_valid, 60.0),
    )
    group = queue_pb2.PromptGroup(group="g", prompt_json='"p"', metadata_json="{}")
    granted = queue_pb2.LeaseGroupsResponse(group=group, attempt=3, samples=samples, kept=kept)
    word = asyncio.run(runner._answer(_Lease(granted)))
    ((how, header, _),) = queue.told
    assert (header.lease.group, header.lease.attempt, header.server, header.term) == ("g", 3, "server", 1)
    assert how == ("returned" if word == "returned" else "put")
    return word, header


def test_kept_samples_count_towards_a_complete_group() -> None:
    workflow = FakeWorkflow({1: 1.0, 3: 0.0})
    word, header = answer(workflow, kept_samples({0: 1.0, 2: 1.0}))
    assert workflow.asked == [1, 3], "kept samples are not generated again"
    assert word == "ok"
    assert header.completes_group == queue_pb2.GROUP_OUTCOME_OK


def test_all_samples_kept_is_a_complete_group_without_rows() -> None:
    workflow = FakeWorkflow({})
    word, header = answer(workflow, kept_samples({0: 1.0, 1: 0.0, 2: 1.0, 3: 1.0}))
    assert workflow.asked == []
    assert (word, header.completes_group) == ("ok", queue_pb2.GROUP_OUTCOME_OK)


def test_a_missing_sample_returns_the_group_with_what_is_finished() -> None:
    word, header = answer(FakeWorkflow({1: 1.0}), kept_samples({0: 1.0, 2: 1.0}))
    assert (word, header.completes_group) == ("returned", queue_pb2.GROUP_OUTCOME_UNSPECIFIED)


@pytest.mark.parametrize(
    ("kept", "new", "outcome"),
    [
        ({0: 1.0, 2: 1.0}, {1: 1.0, 3: 1.0}, queue_pb2.GROUP_OUTCOME_NO_SIGNAL),
        ({0: 0.0, 2: 0.0}, {1: 1.0, 3: 1.0}, queue_pb2.GROUP_OUTCOME_OK),
    ],
)
def test_rewards_of_kept_samples_are_compared_with_the_new_ones(
    kept: dict[int, float], new: dict[int, float], outcome: int
) -> None:
    assert answer(FakeWorkflow(new), kept_samples(kept))[1].completes_group == outcome


def test_I11_kept_samples_without_a_valid_reward_do_not_make_a_group_valid() -> None:
    kept = kept_samples({0: 0.0, 1: 0.0, 2: 0.0}, RewardStatus.TIMEOUT)
    word, header = answer(FakeWorkflow({3: 1.0}), kept)
    assert (word, header.completes_group) == ("failed", queue_pb2.GROUP_OUTCOME_FAILED)
    assert "1 of 4 rewards are valid (timeout)" in header.reason
