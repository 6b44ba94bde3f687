"""Opening, sealing, ending and restarting a run; offering groups."""

from collections.abc import Collection
from dataclasses import replace

from relax_common.errors import AlreadyExists, RunSealed
from relax_queue.rules import events as ev
from relax_queue.rules.group import Group, Status
from relax_queue.rules.state import Phase, RunState, StepPlan
from relax_queue.rules.transaction import Decision, fence, requeue

LIVE = (Status.PENDING, Status.LEASED, Status.READY, Status.PLANNED)


def reopen(decision: Decision, opened: ev.RunOpened) -> None:
    """A repeated OpenRun must have the same content, except that dcs may listen elsewhere and the run may be longer."""
    state = decision.state
    grown = replace(state.spec, total_steps=opened.spec.total_steps)
    if grown == opened.spec and opened.spec.total_steps > state.spec.total_steps and state.phase is not Phase.ENDED:
        decision.emit(ev.RunLengthened(opened.spec.total_steps, opened.recipe_digest))
    elif (opened.recipe_digest, opened.spec) != (state.recipe_digest, state.spec):
        raise AlreadyExists(f"run {state.run} is open with another recipe or schema; choose another run id")
    if opened.dcs_address != state.dcs_address:
        decision.emit(ev.DcsMoved(opened.dcs_address))


def offer(decision: Decision, holder: str, term: int, prompts: list[ev.Prompt], revision: int) -> tuple[int, int]:
    """Add groups to the pending queue in order; (new or rolled back, known before).

    A rolled-back group is taken again only by an offer made after that ROLLBACK record, a new one never once the
    run is sealed.
    """
    state = decision.state
    fresh: list[tuple[ev.Prompt, bool]] = []
    for prompt in prompts:
        known = _known_digest(state, prompt.group)
        if known not in (None, prompt.digest):
            raise AlreadyExists(f"group {prompt.group} was offered with another prompt")
        rolled_back = state.status_of(prompt.group) is Status.ROLLED_BACK
        again = rolled_back and revision >= state.rollback_revision
        if known is None and state.phase is not Phase.OPEN:
            raise RunSealed(f"run {state.run} is {state.phase}: it takes no new groups")
        if known is None or again:
            fresh.append((prompt, again))
    fence(decision, holder, term)
    for prompt, again in fresh:
        if again or state.status_of(prompt.group) is None:
            decision.emit(ev.GroupOffered(prompt, again))
    return len(fresh), len(prompts) - len(fresh)


def _known_digest(state: RunState, group: str) -> int | None:
    if group in state.groups:
        return state.groups[group].prompt.digest
    finished = state.finished.get(group)
    return None if finished is None else finished.prompt_digest


def seal(decision: Decision) -> None:
    """No new groups; repeated sealing changes nothing."""
    if decision.state.phase is Phase.OPEN:
        decision.emit(ev.RunSealed())


def end(decision: Decision) -> None:
    """Return groups that are not trained, and free everything."""
    if decision.state.phase is Phase.ENDED:
        return
    for group in decision.state.where(*LIVE, Status.ROLLED_BACK):
        decision.emit(ev.GroupReturned(group.id))
    for finished in decision.state.finished.since(-1, (Status.ROLLED_BACK,)):
        decision.emit(ev.GroupReturned(finished.id))
    decision.emit(ev.RunEnded())


def restart(decision: Decision, kept_blocks: Collection[int] | None = None) -> None:
    """Blocks of the payload other than these (None: all of it) are gone: their groups go to the front without any.

    A plan in progress with such a group is lost, its other groups are ready again; so are kept steps with one.
    """
    state = decision.state
    if state.phase is Phase.ENDED:
        return
    plan = state.plan
    planned = set(plan.groups()) if plan else set()
    kept = () if kept_blocks is None else kept_blocks
    gone = [group for group in state.where(*LIVE) if _lost_payload(group, kept)]
    whole = not planned.intersection(g.id for g in gone)
    for group in gone:
        requeue(decision, group, "payload_lost")
    lost_steps = [step for step, old in state.kept.items() if old.whole and not _all_there(state, old, kept)]
    decision.emit(ev.PayloadLost(tuple(lost_steps)))
    if whole and kept_blocks is not None:
        return
    for group in state.where(Status.PLANNED):
        decision.emit(ev.GroupUnplanned(group.id, "queue_restarted"))
    decision.emit(ev.PlanLost(plan.step if plan else max(state.head, 0), state.generation + 1, "queue_restarted"))


def _lost_payload(group: Group, kept: Collection[int]) -> bool:
    if not group.parts:
        return group.status in (Status.READY, Status.PLANNED)
    return any(part.block not in kept for part in group.parts)


def _all_there(state: RunState, plan: StepPlan, kept: Collection[int]) -> bool:
    return not any(_lost_payload(state.groups[g], kept) for g in plan.groups())


def exhausted(state: RunState) -> bool:
    """No group can become ready any more: the last step may close short."""
    return state.phase is not Phase.OPEN and not state.count(Status.PENDING, Status.LEASED, Status.ROLLED_BACK)
