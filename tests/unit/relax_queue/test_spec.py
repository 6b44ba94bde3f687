"""What a run may ask the broker for: refused with a name before anything is made for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from relax.queue.v1 import queue_pb2
from relax_common.errors import BadSchema, BadSpec, InvalidInput, NoWriter, OverBudget, RelaxError, UnknownGroup
from relax_common.rows import Field
from relax_queue.broker.field_writes import receive_field
from relax_queue.broker.messages import GROUP_ID_MAX, prompt_from
from relax_queue.rows.spec import FIELDS_MAX, LISTED_MAX, Consumer, RunSpec, check_spec

REWARD = Field("reward", "float32", (), "sample", "rollout")


@pytest.fixture
def spec(new_story: Any) -> RunSpec:
    found: RunSpec = new_story().state.spec
    return replace(found, fields=(REWARD,), consumers=(Consumer("actor", ("reward",)),))


def test_a_sensible_run_is_taken(spec: RunSpec) -> None:
    check_spec(spec)
    check_spec(replace(spec, samples_per_prompt=LISTED_MAX, data_parallel_size=LISTED_MAX, memory_budget_bytes=1 << 60))


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"data_parallel_size": LISTED_MAX + 1}, BadSpec, "data_parallel_size is 65537, it must be at most 65536"),
        ({"samples_per_prompt": 2**32 - 1}, BadSpec, "samples_per_prompt is 4294967295, it must be at most"),
        ({"prompts_per_step": 0}, BadSpec, "prompts_per_step is 0"),
        ({"lease_ttl_seconds": float("nan")}, BadSpec, "lease_ttl_seconds is nan"),
        ({"lease_ttl_seconds": float("inf")}, BadSpec, "lease_ttl_seconds is inf"),
        ({"closing_deadline_seconds": -1.0}, BadSpec, "closing_deadline_seconds is -1.0"),
        ({"max_staleness": 2**64 - 1}, OverBudget, "memory_budget_bytes is"),
        ({"fields": (REWARD, REWARD)}, BadSchema, "field reward occurs twice"),
        ({"fields": (REWARD,) * (FIELDS_MAX + 1)}, BadSchema, "1001 fields and 1 consumers, at most 1000"),
        ({"consumers": (Consumer("actor", ()),) * (FIELDS_MAX + 1)}, BadSchema, "1 fields and 1001 consumers"),
        ({"consumers": (Consumer("actor", ("values",)),)}, NoWriter, "reads field values"),
    ],
)
def test_what_a_broker_cannot_do_is_refused(
    spec: RunSpec, changes: dict[str, Any], error: type[RelaxError], says: str
) -> None:
    with pytest.raises(error, match=says):
        check_spec(replace(spec, **changes))


@pytest.mark.parametrize("length", [0, GROUP_ID_MAX + 1])
def test_the_id_of_a_group_is_neither_empty_nor_endless(length: int) -> None:
    with pytest.raises(InvalidInput, match=f"has {length} characters"):
        prompt_from(queue_pb2.PromptGroup(group="g" * length))
    assert prompt_from(queue_pb2.PromptGroup(group="g" * GROUP_ID_MAX)).group == "g" * GROUP_ID_MAX


def test_a_column_of_unknown_groups_is_refused_before_it_is_read(new_story: Any, spec: RunSpec) -> None:
    story = new_story()
    story.state.spec = replace(spec, fields=(replace(REWARD, writer="judge"),))
    rows = queue_pb2.RowBlock(groups=["nobody"], spans=b"\0" * 12 + b"\1\0\0\0")
    header = queue_pb2.WriteFieldHeader(run="run", role="judge", term=1, field="reward", rows=rows)
    run: Any = SimpleNamespace(state=story.state)
    with pytest.raises(UnknownGroup, match="group nobody was never offered"):
        asyncio.run(receive_field(run, header, b"no column block"))
