"""Planning step s: which ready groups, in which chunks, and when the step closes (I3, I7)."""

import xxhash

from relax_queue.rows.row_keys import RowKeys
from relax_queue.rules import events as ev
from relax_queue.rules.group import Group, Status
from relax_queue.rules.lifecycle import exhausted
from relax_queue.rules.packers import pack
from relax_queue.rules.staleness import make_room
from relax_queue.rules.state import Phase, RunState, StepPlan
from relax_queue.rules.transaction import Decision


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
    """In order of deadline, and of offer where it is the same."""
    return sorted(state.where(Status.READY), key=lambda g: g.deadline)


def _taken(state: RunState) -> int:
    return len(state.plan.groups()) if state.plan else 0


def _plan_chunk(decision: Decision) -> bool:
    """Cut one full chunk, or with a deterministic plan all of them at once; closes the step with its last one."""
    state, spec = decision.state, decision.state.spec
    ready, taken = _ready(state), _taken(state)
    left = spec.prompts_per_step - taken
    size = left if spec.deterministic else min(spec.groups_per_chunk, left)
    if len(ready) < size or not make_room(decision, ready[:size], state.head, taken + size):
        return False
    _emit_chunks(decision, ready[:size])
    if size == left:
        _emit_close(decision, "")
    return True


def _close_short(decision: Decision) -> None:
    """Close with fewer groups: at the end of the run, at its deadline, or when too many groups were dropped."""
    state, spec = decision.state, decision.state.spec
    ready, taken = _ready(state), _taken(state)
    reason = _short_reason(state, taken + len(ready))
    pick = ready[: spec.prompts_per_step - taken]
    if not reason or not (pick or taken) or not make_room(decision, pick, state.head + 1, 0):
        return
    _emit_chunks(decision, pick)
    _emit_close(decision, reason)


def _short_reason(state: RunState, n_groups: int) -> str:
    """Why the step may close with so many groups now; empty if it may not."""
    spec = state.spec
    if exhausted(state):
        return "run_ends"
    beyond = state.drops_by_step.get(state.head, 0) - spec.max_refills_per_step
    if beyond > 0 and n_groups >= max(1, spec.prompts_per_step - beyond):
        return "refills_used_up"
    if state.closing_due == state.head and n_groups >= spec.closing_min_prompts:
        return "closing_deadline"
    return ""


def closing_due(decision: Decision, step: int) -> None:
    """The closing deadline of a step has passed."""
    if decision.state.head == step and decision.state.closing_due != step and _may_plan(decision.state):
        decision.emit(ev.ClosingDue(step))


def late_groups(state: RunState) -> list[Group]:
    """Running groups that keep the step open under stale_policy `wait`."""
    size = state.spec.prompts_per_step
    opened = state.open_groups()
    return [g for i, g in enumerate(opened) if state.head + 1 + i // size > g.deadline and g.status is Status.LEASED]


def _in_order(state: RunState, groups: list[Group]) -> list[Group]:
    """As they were offered; in a deterministic plan by seed, step and id, whatever else happened."""
    if not state.spec.deterministic:
        return sorted(groups, key=lambda g: g.order)
    begin = f"{state.spec.seed}/{state.head}/"
    return sorted(groups, key=lambda g: (xxhash.xxh3_64_intdigest((begin + g.id).encode()), g.id))


def _emit_chunks(decision: Decision, pick: list[Group]) -> None:
    state, spec = decision.state, decision.state.spec
    groups = _in_order(state, pick)
    for at in range(0, len(groups), spec.groups_per_chunk):
        part = groups[at : at + spec.groups_per_chunk]
        rows = [g.trained_rows() for g in part]
        oldest = tuple(g.oldest_trained for g in part)
        decision.emit(
            ev.ChunkPlanned(
                state.lineage,
                state.head,
                state.generation,
                len(state.plan.chunks) if state.plan else 0,
                tuple(g.id for g in part),
                pack(spec.packer, rows, spec.data_parallel_size, spec.tokens_per_microbatch),
                oldest if any(oldest) else (),
            )
        )


def _emit_close(decision: Decision, short_reason: str) -> None:
    state = decision.state
    assert state.plan is not None
    groups = state.plan.groups()
    n_tokens = n_samples = 0
    for group in map(state.groups.__getitem__, groups):
        tokens = group.loss_tokens()
        n_tokens += sum(tokens)
        n_samples += _samples_with_tokens(group.trained_rows().keys, tokens)
    decision.emit(
        ev.StepClosed(
            state.plan.step,
            state.plan.generation,
            len(state.plan.chunks),
            tuple(groups),
            plan_digest(state, state.plan),
            n_tokens,
            n_samples,
            short_reason,
        )
    )


def _samples_with_tokens(keys: RowKeys, tokens: list[int]) -> int:
    if keys.is_one_span:
        return len(tokens) - tokens.count(0)
    return len({sample for (sample, _), n in zip(keys.segments(), tokens, strict=True) if n})


def plan_digest(state: RunState, plan: StepPlan) -> str:
    """Identifies the plan and its payload, so that a commit of other rows is noticed."""
    content = [state.run, plan.lineage, plan.step, plan.generation]
    batches = [[[b.rows for b in rank] for rank in c.ranks] for c in plan.chunks]
    shapes = [[[(keys.groups, len(keys.spans)) for keys in rank] for rank in ranks] for ranks in batches]
    chunks = [[c.groups, c.oldest_trained] for c in plan.chunks]
    payload = [[p.digest for p in state.groups[g].parts if p.digest] for g in plan.groups()]
    digest = xxhash.xxh3_128(repr((content, chunks, shapes, payload)).encode())
    for keys in (keys for ranks in batches for rank in ranks for keys in rank):
        digest.update(keys.spans)
    return digest.hexdigest()
