"""What happens to an open group that cannot be trained in time, by stale_policy (I2, I3).

| policy | while a step is planned | after a commit or rollback |
|---|---|---|
| wait | the step waits for it | to the front without tokens |
| mask | its deadline moves, older tokens leave the loss mask; dropped if none is left | the same |
| regenerate | to the front without tokens | the same |
| drop | dropped and counted | the same |
"""

from relax_queue.rules import events as ev
from relax_queue.rules.admission import first_late
from relax_queue.rules.group import Group, Status
from relax_queue.rules.state import RunState
from relax_queue.rules.transaction import Decision, requeue

TOO_STALE = "too_stale"


def make_room(decision: Decision, pick: list[Group], head: int, taken: int) -> bool:
    """Do all open groups but `pick` fit from step `head` on? Late ones are settled by the policy; `wait` refuses."""
    state, chosen = decision.state, {g.id for g in pick}
    while True:
        rest = [g for g in state.open_groups() if g.id not in chosen]
        at = _first_late(state, rest, head, taken)
        if at is None:
            return True
        if state.spec.stale_policy == "wait":
            return False
        settle_late(decision, rest[at], head + (taken + at) // state.spec.prompts_per_step)


def refit(decision: Decision) -> None:
    """After a commit or a rollback: nothing is left to wait for."""
    state = decision.state
    while True:
        opened = state.open_groups()
        at = _first_late(state, opened, state.head, 0)
        if at is None:
            return
        settle_late(decision, opened[at], state.head + at // state.spec.prompts_per_step)


def _first_late(state: RunState, groups: list[Group], head: int, taken: int) -> int | None:
    return first_late([g.deadline for g in groups], head, state.spec.prompts_per_step, taken)


def settle_late(decision: Decision, group: Group, step: int) -> None:
    """`step` is the first that has a place for the group; its deadline is before that."""
    policy = decision.state.spec.stale_policy
    if policy == "drop":
        decision.emit(ev.GroupDropped(group.id, TOO_STALE, decision.state.head))
    elif policy == "mask":
        mask(decision, group, step)
    else:
        requeue(decision, group, TOO_STALE)


def mask(decision: Decision, group: Group, step: int) -> None:
    """Let a group be trained until `step`, not before its deadline, without its tokens that are older than that allows.

    A group that is still being generated is checked when it is put.
    """
    oldest = step - decision.state.spec.max_staleness
    decision.emit(ev.GroupMasked(group.id, oldest, step))
    if group.status is Status.READY and not group.has_tokens_to_train():
        decision.emit(ev.GroupDropped(group.id, TOO_STALE, decision.state.head))
