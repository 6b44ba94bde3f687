"""apply(state, event): how each event changes a run. Deterministic and total; it decides and refuses nothing."""

from collections.abc import Iterable
from dataclasses import replace
from functools import singledispatch

from relax_common.versions import PolicyVersion
from relax_queue.rules import events as ev
from relax_queue.rules.group import Group, Part, Status
from relax_queue.rules.state import Answer, Confirmation, Phase, RunState, StepPlan

ANSWERS_KEPT = 8192
"""How many answers of puts are stored; the oldest are forgotten. A repeat comes within the deadline of its call."""


def opened(event: ev.RunOpened) -> RunState:
    """The state that a run begins with."""
    return RunState(event.run, event.recipe_digest, event.spec, event.dcs_address)


def fold(transactions: Iterable[ev.Transaction], state: RunState | None = None) -> RunState | None:
    """State after all transactions, from a snapshot's state if there is one; None if there is neither."""
    for transaction in transactions:
        for event in transaction.events:
            if isinstance(event, ev.RunOpened):
                state = opened(event)
            elif state is not None:
                apply(state, event)
    return state


def apply(state: RunState, event: ev.Event) -> None:
    """Change `state` by one event."""
    # Events have no subclasses, so the handler is looked up directly; the dispatcher would add three calls.
    _apply.registry.get(type(event), _apply)(event, state)


@singledispatch
def _apply(event: object, state: RunState) -> None:
    raise TypeError(f"{type(event).__name__} is not an event of a run")


@_apply.register
def _dcs_moved(event: ev.DcsMoved, state: RunState) -> None:
    state.dcs_address = event.dcs_address


@_apply.register
def _lengthened(event: ev.RunLengthened, state: RunState) -> None:
    state.spec = replace(state.spec, total_steps=event.total_steps)
    state.recipe_digest = event.recipe_digest


@_apply.register
def _term(event: ev.TermRegistered, state: RunState) -> None:
    state.terms.register(event.holder, event.term)


@_apply.register
def _sealed(event: ev.RunSealed, state: RunState) -> None:
    state.phase = Phase.DRAINING


@_apply.register
def _ended(event: ev.RunEnded, state: RunState) -> None:
    state.phase = Phase.ENDED
    state.plan = None
    state.kept.clear()
    state.free(state.groups.values())
    state.finish()


@_apply.register
def _offered(event: ev.GroupOffered, state: RunState) -> None:
    known = state.groups.get(event.prompt.group)
    if known is not None:
        known.prompt, known.leases_lost = event.prompt, 0
        state.set_status(known, Status.PENDING)
        return
    finished = state.finished.take(event.prompt.group)
    if finished is not None:
        group = Group(finished.id, finished.order, event.prompt, attempts=finished.attempts)
        state.groups[group.id] = group
        state.set_status(group, Status.PENDING)
        return
    group = Group(event.prompt.group, state.next_order, event.prompt)
    state.groups[group.id] = group
    state.next_order += 1
    state.n_offered += 1
    state.last_offered = group.id
    state.set_status(group, Status.PENDING)


@_apply.register
def _leased(event: ev.GroupLeased, state: RunState) -> None:
    group = state.groups[event.group]
    if event.discard_kept:
        state.free([group])
    if group.attempts == 0:
        state.n_admitted += 1
    if not group.reserved:
        group.reserved = True
        state.n_reserved += 1
    group.attempts = event.attempt
    group.server, group.term = event.server, event.term
    group.confirmed, group.deadline, group.oldest_trained = event.confirmed, event.deadline, 0
    state.set_status(group, Status.LEASED)


@_apply.register
def _rows_stored(event: ev.RowsStored, state: RunState) -> None:
    group = state.groups[event.group]
    if group.parts:
        _replace(group, set(event.samples), state)
    group.parts.append(Part(event.block, event.fields, event.rows.keys, event.digest, group.attempts))
    group.rows = group.rows.merged(event.rows)
    group.samples = group.samples.merged(event.samples)
    _block(state, event.block, event.n_bytes)


def _replace(group: Group, samples: set[int], state: RunState) -> None:
    """Forget the rows of these samples that earlier leases left."""
    group.rows = group.rows.without(samples)
    for part in [p for p in group.parts if samples.issuperset(p.samples())]:
        group.parts.remove(part)
        del state.blocks[part.block]


@_apply.register
def _field_stored(event: ev.FieldStored, state: RunState) -> None:
    group = state.groups[event.group]
    group.parts.append(Part(event.block, (event.field,), event.units, "", group.attempts))
    _block(state, event.block, event.n_bytes)


def _block(state: RunState, block: int, n_bytes: int) -> None:
    state.blocks[block] = n_bytes
    state.next_block = max(state.next_block, block + 1)


@_apply.register
def _completed(event: ev.GroupCompleted, state: RunState) -> None:
    state.set_status(state.groups[event.group], Status.READY)


@_apply.register
def _requeued(event: ev.GroupRequeued, state: RunState) -> None:
    group = state.groups[event.group]
    if not event.keep or not group.samples:
        state.free([group])
    state.n_leases_lost += event.lease_lost
    group.leases_lost += event.lease_lost and event.reason in ev.LOST_LEASE
    group.oldest_trained = 0
    state.set_status(group, Status.PENDING)


@_apply.register
def _masked(event: ev.GroupMasked, state: RunState) -> None:
    group = state.groups[event.group]
    group.oldest_trained, group.deadline = event.oldest_trained, event.deadline


@_apply.register
def _kept_freed(event: ev.KeptFreed, state: RunState) -> None:
    state.free([state.groups[event.group]])


@_apply.register
def _dropped(event: ev.GroupDropped, state: RunState) -> None:
    group = state.groups[event.group]
    group.step, group.reason, group.detail = event.step, event.reason, event.detail
    state.drops_by_step[event.step] = state.drops_by_step.get(event.step, 0) + 1
    state.dropped_by_reason[event.reason] = state.dropped_by_reason.get(event.reason, 0) + 1
    state.free([group])
    state.set_status(group, Status.DROPPED)


@_apply.register
def _unplanned(event: ev.GroupUnplanned, state: RunState) -> None:
    state.set_status(state.groups[event.group], Status.READY)


@_apply.register
def _trained(event: ev.GroupTrained, state: RunState) -> None:
    group = state.groups[event.group]
    _uncount_drop(group, state)
    if group.status is Status.LEASED:
        state.n_leases_lost += 1
    kept = state.kept.get(event.step)
    if kept is None or not kept.whole:
        state.free([group])
    group.step = event.step
    state.set_status(group, Status.TRAINED)


def _uncount_drop(group: Group, state: RunState) -> None:
    if group.status is not Status.DROPPED:
        return
    state.drops_by_step[group.step] -= 1
    _uncount_reason(group.reason, state)
    group.reason = group.detail = ""


def _uncount_reason(reason: str, state: RunState) -> None:
    state.dropped_by_reason[reason] -= 1
    if not state.dropped_by_reason[reason]:
        del state.dropped_by_reason[reason]


@_apply.register
def _returned(event: ev.GroupReturned, state: RunState) -> None:
    finished = state.finished.take(event.group)
    if finished is not None:
        state.finished.restore(replace(finished, status=Status.RETURNED))
        return
    group = state.groups[event.group]
    state.free([group])
    state.set_status(group, Status.RETURNED)


@_apply.register
def _rolled_back(event: ev.GroupRolledBack, state: RunState) -> None:
    finished = state.finished.take(event.group)
    if finished is not None:
        if finished.status is Status.DROPPED:
            _uncount_reason(finished.reason, state)
        state.finished.restore(replace(finished, status=Status.ROLLED_BACK, step=-1, reason=""))
        return
    group = state.groups[event.group]
    _uncount_drop(group, state)
    state.free([group])
    group.step = -1
    state.set_status(group, Status.ROLLED_BACK)


@_apply.register
def _answer(event: ev.AnswerStored, state: RunState) -> None:
    state.answers[event.key] = Answer(event.content, event.answer)
    if len(state.answers) > ANSWERS_KEPT:
        del state.answers[next(iter(state.answers))]


@_apply.register
def _planned(event: ev.ChunkPlanned, state: RunState) -> None:
    if state.plan is None:
        state.plan = StepPlan(event.lineage, event.step, event.generation)
    state.plan.chunks.append(event)
    for group in event.groups:
        state.set_status(state.groups[group], Status.PLANNED)


@_apply.register
def _closing_due(event: ev.ClosingDue, state: RunState) -> None:
    state.closing_due = event.step


@_apply.register
def _closed(event: ev.StepClosed, state: RunState) -> None:
    if state.plan is not None:
        state.plan.close = event


@_apply.register
def _plan_lost(event: ev.PlanLost, state: RunState) -> None:
    state.plan = None
    state.generation = event.generation


@_apply.register
def _payload_lost(event: ev.PayloadLost, state: RunState) -> None:
    for step in event.steps:
        plan = state.kept[step]
        plan.whole = False
        state.free(state.groups[g] for g in plan.groups())


@_apply.register
def _commit(event: ev.CommitFollowed, state: RunState) -> None:
    state.applied_revision = event.revision
    state.line.append(event.lineage)
    if event.step is None:
        return
    plan = state.plan if event.whole else None
    state.kept[event.step] = plan or StepPlan(event.lineage, event.step, state.generation, whole=False)
    state.plan = None


@_apply.register
def _confirmed(event: ev.ConfirmFollowed, state: RunState) -> None:
    state.applied_revision = event.revision
    state.confirmed[event.server] = Confirmation(event.term, PolicyVersion(event.lineage, event.version))


@_apply.register
def _frontier(event: ev.FrontierFollowed, state: RunState) -> None:
    state.applied_revision = event.revision
    state.frontier = max(state.frontier, event.version)
    _forget_steps([s for s in state.kept if s < state.frontier], state)
    state.finish()


@_apply.register
def _rollback(event: ev.RollbackFollowed, state: RunState) -> None:
    state.applied_revision = state.rollback_revision = event.revision
    state.lineage = event.lineage
    del state.line[event.head + 1 :]
    state.frontier = min(state.frontier, event.head)
    state.closing_due = -1
    _forget_steps([s for s in state.kept if s >= event.head], state)
    for server, confirmation in list(state.confirmed.items()):
        if not state.on_line(confirmation.version):
            del state.confirmed[server]


def _forget_steps(steps: Iterable[int], state: RunState) -> None:
    for step in steps:
        state.free(state.groups[g] for g in state.kept.pop(step).groups())
