"""Planning step s: which ready groups, in which chunks, and when the step closes (I3, I7)."""

import json

import xxhash

from relax_queue import events as ev
from relax_queue.admission import fits
from relax_queue.decision import Decision
from relax_queue.group import Group, Status
from relax_queue.lifecycle import exhausted
from relax_queue.run_state import Phase, RunState, StepPlan
from relax_queue.shapers import Ranks, Unit, token_budget, whole_groups


def plan(decision: Decision) -> None:
    """Plan whatever can be planned of step s = head. Never closes a step that is empty."""
    state = decision.state
    while _may_plan(state) and _plan_chunk(decision):
        pass
    if _may_plan(state):
        _close_short(decision)


def _may_plan(state: RunState) -> bool:
    if state.phase is Phase.ENDED or state.head < 0 or _steps_done(state):
        return False
    return state.plan is None or state.plan.close is None


def _steps_done(state: RunState) -> bool:
    return bool(state.spec.total_steps) and state.head >= state.spec.total_steps


def run_over(state: RunState, step: int) -> bool:
    """Will step `step` never be planned?"""
    if state.phase is Phase.ENDED or (state.spec.total_steps and step >= state.spec.total_steps):
        return True
    live = (Status.PENDING, Status.LEASED, Status.READY, Status.PLANNED, Status.ROLLED_BACK)
    return state.phase is Phase.DRAINING and step >= state.head and not state.count(*live)


def _ready(state: RunState) -> list[Group]:
    return sorted(state.where(Status.READY), key=lambda g: (g.deadline, g.order))


def _taken(state: RunState) -> int:
    return len(state.plan.groups()) if state.plan else 0


def _plan_chunk(decision: Decision) -> bool:
    """Cut one full chunk; closes the step with its last one."""
    state, spec = decision.state, decision.state.spec
    ready, taken = _ready(state), _taken(state)
    size = min(spec.groups_per_chunk, spec.prompts_per_step - taken)
    if len(ready) < size or not _make_room(decision, ready[:size], state.head, taken + size):
        return False
    _emit_chunk(decision, ready[:size])
    if taken + size == spec.prompts_per_step:
        _emit_close(decision, "")
    return True


def _close_short(decision: Decision) -> None:
    """Close with fewer groups: at the end of the run, or when more groups were dropped than may be refilled."""
    state, spec = decision.state, decision.state.spec
    ready, taken = _ready(state), _taken(state)
    beyond = state.drops_by_step.get(state.head, 0) - spec.max_refills_per_step
    if exhausted(state):
        reason = "run_ends"
    elif beyond > 0 and taken + len(ready) >= max(1, spec.prompts_per_step - beyond):
        reason = "refills_used_up"
    else:
        return
    pick = ready[: spec.prompts_per_step - taken]
    if not pick and not taken:
        return
    if not _make_room(decision, pick, state.head + 1, 0):
        return
    for at in range(0, len(pick), spec.groups_per_chunk):
        _emit_chunk(decision, pick[at : at + spec.groups_per_chunk])
    _emit_close(decision, reason)


def _make_room(decision: Decision, pick: list[Group], head: int, taken: int) -> bool:
    """Do all other open groups still fit? With stale_policy `drop` those due first are dropped until they do."""
    state, spec = decision.state, decision.state.spec
    chosen = {g.id for g in pick}
    rest = [g for g in state.open_groups() if g.id not in chosen]
    while not fits([g.deadline for g in rest], head, spec.prompts_per_step, taken):
        if spec.stale_policy == "wait":
            return False
        decision.emit(ev.GroupDropped(rest.pop(0).id, "too_stale", state.head))
    return True


def late_groups(state: RunState) -> list[Group]:
    """Running groups that keep the step open under stale_policy `wait`."""
    size = state.spec.prompts_per_step
    opened = state.open_groups()
    return [g for i, g in enumerate(opened) if state.head + 1 + i // size > g.deadline and g.status is Status.LEASED]


def _units(group: Group) -> list[Unit]:
    by_sample: dict[int, list[ev.RowFacts]] = {}
    for row in group.trained_rows():
        by_sample.setdefault(row.sample, []).append(row)
    return [
        Unit(tuple((group.id, r.sample, r.segment) for r in rows), sum(r.n_tokens for r in rows))
        for rows in by_sample.values()
    ]


def _shape(state: RunState, groups: list[Group]) -> Ranks:
    spec, units = state.spec, [_units(g) for g in groups]
    if spec.shaper == "whole_groups":
        return whole_groups(units, spec.data_parallel_size)
    return token_budget(units, spec.data_parallel_size, spec.tokens_per_microbatch)


def _emit_chunk(decision: Decision, groups: list[Group]) -> None:
    state = decision.state
    groups = sorted(groups, key=lambda g: g.order)
    decision.emit(
        ev.ChunkPlanned(
            state.lineage,
            state.head,
            state.generation,
            len(state.plan.chunks) if state.plan else 0,
            tuple(g.id for g in groups),
            _shape(state, groups),
        )
    )


def _emit_close(decision: Decision, short_reason: str) -> None:
    state = decision.state
    assert state.plan is not None
    groups = state.plan.groups()
    rows = [row for g in groups for row in state.groups[g].trained_rows()]
    samples = {(g, r.sample) for g in groups for r in state.groups[g].trained_rows() if r.n_loss_tokens}
    decision.emit(
        ev.StepClosed(
            state.plan.step,
            state.plan.generation,
            len(state.plan.chunks),
            tuple(groups),
            plan_digest(state, state.plan),
            sum(row.n_loss_tokens for row in rows),
            len(samples),
            short_reason,
        )
    )


def plan_digest(state: RunState, plan: StepPlan) -> str:
    """Names the plan and the payload behind it, so that a commit of other rows is told apart."""
    content = [state.run, plan.lineage, plan.step, plan.generation]
    chunks = [[c.groups, [[b.rows for b in rank] for rank in c.ranks]] for c in plan.chunks]
    payload = [[p.digest for p in state.groups[g].parts if p.digest] for g in plan.groups()]
    return xxhash.xxh3_128_hexdigest(json.dumps([content, chunks, payload]).encode())
