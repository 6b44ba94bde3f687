"""Converts messages to values and back."""

from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

from relax.common.v1 import common_pb2
from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import InvalidInput, RelaxError
from relax_common.rows import Field, RowKey, Scope
from relax_common.versions import PolicyVersion
from relax_queue.rows.row_keys import block_to
from relax_queue.rows.spec import Closing, Consumer, Durability, Packer, RunSpec, StalePolicy
from relax_queue.rules import events as ev
from relax_queue.rules.finished import FinishedGroup
from relax_queue.rules.group import Group, Status
from relax_queue.rules.state import Phase, RunState, StepPlan

T = TypeVar("T")

GROUP_ID_MAX = 256
"""Characters of a group's id: it is in the key of every row, in every event and in every log line of the group."""

_SCOPES: dict[int, Scope] = {pb.SCOPE_ROW: "row", pb.SCOPE_SAMPLE: "sample", pb.SCOPE_GROUP: "group"}
_NEEDS: dict[int, Literal["step", "any"]] = {pb.NEEDS_VERSION_STEP: "step", pb.NEEDS_VERSION_ANY: "any"}
_PACKERS: dict[int, Packer] = {
    pb.PACKER_SEQUENTIAL: "sequential",
    pb.PACKER_LENGTH_BALANCED: "length_balanced",
    pb.PACKER_WHOLE_GROUPS: "whole_groups",
    pb.PACKER_TOKEN_BUDGET: "token_budget",
}
_POLICIES: dict[int, StalePolicy] = {
    pb.STALE_POLICY_WAIT: "wait",
    pb.STALE_POLICY_MASK: "mask",
    pb.STALE_POLICY_REGENERATE: "regenerate",
    pb.STALE_POLICY_DROP: "drop",
}
_CLOSINGS: dict[int, Closing] = {
    pb.CLOSING_UNSPECIFIED: "all",
    pb.CLOSING_ALL: "all",
    pb.CLOSING_MIN_N: "min_n",
}
_DURABILITIES: dict[int, Durability] = {
    pb.DURABILITY_UNSPECIFIED: "metadata",
    pb.DURABILITY_METADATA: "metadata",
    pb.DURABILITY_FULL: "full",
}
_OUTCOMES: dict[int, Literal["ok", "no_signal", "failed"]] = {
    pb.GROUP_OUTCOME_OK: "ok",
    pb.GROUP_OUTCOME_NO_SIGNAL: "no_signal",
    pb.GROUP_OUTCOME_FAILED: "failed",
}
_PHASES = {
    Phase.OPEN: pb.RUN_STATE_OPEN,
    Phase.DRAINING: pb.RUN_STATE_DRAINING,
    Phase.ENDED: pb.RUN_STATE_ENDED,
}


def _chosen(known: Mapping[int, T], value: int, what: str) -> T:
    if value not in known:
        raise InvalidInput(f"{what} is not set to a value that this daemon knows ({value})")
    return known[value]


def outcome(value: int) -> Literal["ok", "no_signal", "failed"] | None:
    return None if value == pb.GROUP_OUTCOME_UNSPECIFIED else _chosen(_OUTCOMES, value, "completes_group")


def field_from(message: pb.Field) -> Field:
    scope = _chosen(_SCOPES, message.scope, f"scope of field {message.name}")
    return Field(message.name, message.dtype, tuple(message.shape), scope, message.writer, bytes_max=message.bytes_max)


def spec_from(message: pb.RunSpec) -> RunSpec:
    """The specification in the message, not yet checked; see spec.check_spec."""
    return RunSpec(
        fields=tuple(field_from(f) for f in message.fields),
        consumers=tuple(
            Consumer(c.name, tuple(c.fields), _chosen(_NEEDS, c.needs_version, f"needs_version of consumer {c.name}"))
            for c in message.consumers
        ),
        prompts_per_step=message.prompts_per_step,
        samples_per_prompt=message.samples_per_prompt,
        max_staleness=message.max_staleness,
        snapshot_every=message.snapshot_every,
        tokens_per_row_max=message.tokens_per_row_max,
        tokens_per_microbatch=message.tokens_per_microbatch,
        groups_per_chunk=message.groups_per_chunk or message.prompts_per_step,
        data_parallel_size=message.data_parallel_size,
        packer=_chosen(_PACKERS, message.packer, "packer"),
        stale_policy=_chosen(_POLICIES, message.stale_policy, "stale_policy"),
        min_valid_samples=message.min_valid_samples,
        max_refills_per_step=message.max_refills_per_step,
        memory_budget_bytes=message.memory_budget_bytes,
        lease_ttl_seconds=message.lease_ttl_seconds,
        total_steps=message.total_steps,
        durability=_chosen(_DURABILITIES, message.durability, "durability"),
        seed=message.seed,
        deterministic=message.deterministic,
        closing=_chosen(_CLOSINGS, message.closing, "closing"),
        closing_min_prompts=message.closing_min_prompts,
        closing_deadline_seconds=message.closing_deadline_seconds,
        lease_attempts_max=message.lease_attempts_max,
    )


def prompt_from(message: pb.PromptGroup) -> ev.Prompt:
    if not 1 <= len(message.group) <= GROUP_ID_MAX:
        raise InvalidInput(f"the id of a prompt group has {len(message.group)} characters, 1 to {GROUP_ID_MAX} may be")
    return ev.Prompt(
        message.group,
        getattr(message, "pass"),
        message.position,
        message.prompt_json,
        message.label if message.HasField("label") else None,
        message.metadata_json,
        tuple(message.blobs),
        message.traceparent,
    )


def prompt_to(prompt: ev.Prompt) -> pb.PromptGroup:
    message = pb.PromptGroup(
        group=prompt.group,
        position=prompt.position,
        prompt_json=prompt.prompt_json,
        label=prompt.label,
        metadata_json=prompt.metadata_json,
        blobs=prompt.blobs,
        traceparent=prompt.traceparent,
    )
    setattr(message, "pass", prompt.pass_over_data)
    return message


def keys_to(keys: Iterable[RowKey]) -> list[common_pb2.RowKey]:
    return [common_pb2.RowKey(group=g, sample=s, segment=t) for g, s, t in keys]


def refusal_to(error: RelaxError) -> pb.Refusal:
    return pb.Refusal(code=error.code.name, message=error.message, reason=error.reason, details=error.details)


def plan_key(plan: StepPlan) -> pb.PlanKey:
    return pb.PlanKey(lineage=plan.lineage, step=plan.step, generation=plan.generation)


def chunk_to(chunk: ev.ChunkPlanned) -> pb.Chunk:
    ranks = [
        pb.RankPlan(microbatches=[pb.Microbatch(rows=block_to(b.rows), tokens=b.n_tokens) for b in rank])
        for rank in chunk.ranks
    ]
    return pb.Chunk(index=chunk.chunk, groups=chunk.groups, ranks=ranks, oldest_trained_versions=chunk.oldest_trained)


def close_to(close: ev.StepClosed) -> pb.StepClose:
    return pb.StepClose(
        chunks=close.n_chunks,
        groups=close.groups,
        plan_digest=close.plan_digest,
        n_tokens=close.n_tokens,
        n_samples=close.n_samples,
        short_reason=close.short_reason,
    )


def plan_to(plan: StepPlan | None, chunk: ev.ChunkPlanned | None, close: ev.StepClosed | None) -> pb.GetPlanResponse:
    """The message for a chunk or a closing of a plan; without a plan the run is over."""
    if plan is None:
        return pb.GetPlanResponse(run_over=True)
    if chunk is not None:
        return pb.GetPlanResponse(plan=plan_key(plan), chunk=chunk_to(chunk))
    return pb.GetPlanResponse(plan=plan_key(plan), close=close_to(close) if close else None)


def counts_to(state: RunState) -> pb.LedgerCounts:
    return pb.LedgerCounts(
        admitted=state.n_admitted,
        offered=state.n_offered,
        pending=state.count(Status.PENDING),
        leased=state.count(Status.LEASED),
        ready=state.count(Status.READY),
        planned=state.count(Status.PLANNED),
        trained=state.count(Status.TRAINED),
        dropped=state.dropped_by_reason,
        returned=state.count(Status.RETURNED),
        rolled_back=state.count(Status.ROLLED_BACK),
        leases_lost=state.n_leases_lost,
    )


def status_to(state: RunState, waits: list[pb.Wait]) -> pb.RunStatus:
    message = pb.RunStatus(
        run=state.run,
        state=_PHASES[state.phase],
        applied_revision=state.applied_revision,
        counts=counts_to(state),
        bytes_held=state.bytes_held,
        bytes_reserved=state.n_reserved * state.spec.bytes_per_group,
        bytes_budget=state.spec.memory_budget_bytes,
        waits=waits,
        confirmed={server: c.version.to_proto() for server, c in state.confirmed.items()},
        plan_generation=state.generation,
        durability=state.spec.durability,
        last_offered=state.last_offered,
    )
    if state.line:
        message.head.CopyFrom(PolicyVersion(state.line[-1], state.head).to_proto())
    return message


def inspect_to(state: RunState, group: Group) -> pb.InspectResponse:
    return pb.InspectResponse(
        state=group.status,
        group=prompt_to(group.prompt),
        rows=keys_to(group.rows.keys),
        fields=sorted({name for part in group.parts for name in part.fields}),
        deadline_version=group.deadline if group.attempts else None,
        attempts=group.attempts,
        reason=f"{group.reason}: {group.detail}" if group.detail else group.reason,
    )


def finished_to(group: FinishedGroup) -> pb.InspectResponse:
    """The message for a group whose end is final, with what is still known of it."""
    return pb.InspectResponse(
        state=group.status,
        group=pb.PromptGroup(group=group.id),
        attempts=group.attempts,
        reason=group.reason,
    )


def partition_to(state: RunState, plan: StepPlan) -> pb.Partition:
    groups = [state.groups[g] for g in plan.groups()]
    return pb.Partition(
        name=f"train/{plan.step}",
        plan=plan_key(plan),
        chunks=len(plan.chunks),
        closed=plan.close is not None,
        committed=plan is not state.plan,
        rows=sum(len(g.rows) for g in groups),
        bytes=sum(state.blocks[part.block] for g in groups for part in g.parts),
    )
