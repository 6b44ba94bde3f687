"""Following the dcs log: each record changes the run in one transaction together with the applied revision.

Records at or before the applied revision change nothing.
"""

from relax_common.errors import RelaxError
from relax_common.versions import PolicyVersion
from relax_queue.rules import events as ev
from relax_queue.rules.group import Status
from relax_queue.rules.staleness import refit
from relax_queue.rules.transaction import Decision, requeue


class LogGap(RelaxError):
    """The dcs log does not continue what the broker has applied; the run needs a person."""


def commit(decision: Decision, revision: int, step: int | None, version: tuple[int, int], groups: tuple[str, ...],
           plan_digest: str) -> None:  # fmt: skip
    """C(s): its groups are trained, whatever became of them; others of the plan are ready again; the head moves."""
    state = decision.state
    if revision <= state.applied_revision:
        return
    lineage, number = version
    if number != state.head + 1:
        raise LogGap(
            f"run {state.run}: the dcs log commits version {number} at revision {revision}, head is {state.head}"
        )
    plan = state.plan
    whole = plan is not None and plan.step == step and plan.close is not None and plan.close.plan_digest == plan_digest
    planned = [g.id for g in state.where(Status.PLANNED)]
    decision.emit(ev.CommitFollowed(revision, lineage, number, step, whole))
    for group in groups:
        if group in state.groups and step is not None:
            decision.emit(ev.GroupTrained(group, step))
    for group in planned:
        if state.groups[group].status is Status.PLANNED:
            decision.emit(ev.GroupUnplanned(group, "other_plan_committed"))
    refit(decision)


def confirm(decision: Decision, revision: int, server: str, term: int, version: tuple[int, int]) -> None:
    """A server serves a version, verified."""
    if revision > decision.state.applied_revision:
        decision.emit(ev.ConfirmFollowed(revision, server, term, *version))


def frontier(decision: Decision, revision: int, version: int) -> None:
    """F has moved: rows of earlier steps are freed."""
    if revision > decision.state.applied_revision:
        decision.emit(ev.FrontierFollowed(revision, version))


def checkpoint(decision: Decision, revision: int, version: tuple[int, int]) -> None:
    """A checkpoint moves F if it is on the line; one that ended after a rollback past it only counts as read."""
    state = decision.state
    if revision > state.applied_revision:
        moved = state.on_line(PolicyVersion(*version))
        decision.emit(ev.FrontierFollowed(revision, version[1] if moved else state.frontier))


def rollback(decision: Decision, revision: int, lineage: int, head: int) -> None:
    """The lineage ended: groups that ended in steps >= head roll back, leases and whatever is off the line are void."""
    state = decision.state
    if revision <= state.applied_revision:
        return
    if head > state.head:
        raise LogGap(f"run {state.run}: the dcs log rolls back to version {head}, head is {state.head}")
    plan = state.plan
    decision.emit(ev.RollbackFollowed(revision, lineage, head))
    for group in state.where(Status.TRAINED, Status.DROPPED):
        if group.step >= head:
            decision.emit(ev.GroupRolledBack(group.id))
    for finished in state.finished.since(head, (Status.TRAINED, Status.DROPPED)):
        decision.emit(ev.GroupRolledBack(finished.id))
    for group in state.where(Status.PLANNED):
        decision.emit(ev.GroupUnplanned(group.id, "rollback"))
    decision.emit(ev.PlanLost(plan.step if plan else head, state.generation + 1, "rollback"))
    for group in state.where(Status.LEASED, Status.READY, Status.PENDING):
        off_line = any(not state.on_line(v) for v in group.versions())
        if group.status is Status.LEASED or off_line:
            requeue(decision, group, "rollback")
    refit(decision)
