"""Opening, sealing, ending and restarting a run; offering groups."""

from relax_common.errors import AlreadyExists, Precondition
from relax_queue import events as ev
from relax_queue.decision import Decision, fence, requeue
from relax_queue.group import Status
from relax_queue.run_state import Phase, RunState

LIVE = (Status.PENDING, Status.LEASED, Status.READY, Status.PLANNED)


def reopen(decision: Decision, opened: ev.RunOpened) -> None:
    """A repeated OpenRun: the same content is fine, and the dcs may listen elsewhere by now."""
    state = decision.state
    if (opened.recipe_digest, opened.spec) != (state.recipe_digest, state.spec):
        raise AlreadyExists(f"run {state.run} is open with another recipe or schema; choose another run id")
    if opened.dcs_address != state.dcs_address:
        decision.emit(ev.DcsMoved(opened.dcs_address))


def offer(decision: Decision, holder: str, term: int, prompts: list[ev.Prompt], revision: int) -> tuple[int, int]:
    """Add groups to the line in order; (new or rolled back, known before).

    A rolled-back group is taken again only by an offer made behind that ROLLBACK record, a new one never once the
    run is sealed.
    """
    state = decision.state
    fresh: list[tuple[ev.Prompt, bool]] = []
    for prompt in prompts:
        known = state.groups.get(prompt.group)
        if known is not None and known.prompt != prompt:
            raise AlreadyExists(f"group {prompt.group} was offered with another prompt")
        again = known is not None and known.status is Status.ROLLED_BACK and revision >= state.rollback_revision
        if known is None and state.phase is not Phase.OPEN:
            raise Precondition(f"run {state.run} is {state.phase}: it takes no new groups", reason="RUN_SEALED")
        if known is None or again:
            fresh.append((prompt, again))
    fence(decision, holder, term)
    for prompt, again in fresh:
        if prompt.group not in state.groups or again:
            decision.emit(ev.GroupOffered(prompt, again))
    return len(fresh), len(prompts) - len(fresh)


def seal(decision: Decision) -> None:
    """No new groups; repeated sealing changes nothing."""
    if decision.state.phase is Phase.OPEN:
        decision.emit(ev.RunSealed())


def end(decision: Decision) -> None:
    """Return what is not trained and free everything."""
    if decision.state.phase is Phase.ENDED:
        return
    for group in decision.state.where(*LIVE, Status.ROLLED_BACK):
        decision.emit(ev.GroupReturned(group.id))
    decision.emit(ev.RunEnded())


def restart(decision: Decision) -> None:
    """The payload is gone: groups that had some go to the front, the plan in progress is lost."""
    state = decision.state
    if state.phase is Phase.ENDED:
        return
    lost_plan = state.plan
    for group in state.where(Status.LEASED, Status.READY, Status.PLANNED, Status.PENDING):
        if group.rows or group.status in (Status.READY, Status.PLANNED):
            requeue(decision, group, "payload_lost")
    decision.emit(ev.PayloadLost())
    step = lost_plan.step if lost_plan else max(state.head, 0)
    decision.emit(ev.PlanLost(step, state.generation + 1, "queue_restarted"))


def exhausted(state: RunState) -> bool:
    """No group can become ready any more: the last step may close short."""
    return state.phase is not Phase.OPEN and not state.count(Status.PENDING, Status.LEASED, Status.ROLLED_BACK)
