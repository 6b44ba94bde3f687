"""A decision in progress: events are applied as they are made, so that later ones see what earlier ones changed."""

from dataclasses import dataclass, field

from relax_common.errors import AlreadyExists
from relax_queue.rules import events as ev
from relax_queue.rules.apply import apply
from relax_queue.rules.group import Group, Status
from relax_queue.rules.state import RunState


@dataclass(slots=True)
class Decision:
    """Emitted events are logged as one transaction, even if the command then refuses (a newer term stays known)."""

    state: RunState
    events: list[ev.Event] = field(default_factory=list)

    def emit(self, event: ev.Event) -> None:
        apply(self.state, event)
        self.events.append(event)


def fence(decision: Decision, holder: str, term: int) -> None:
    """Refuse an old term; remember a newer one, which takes the holder's leases away (I8)."""
    if not decision.state.terms.check(holder, term):
        return
    decision.emit(ev.TermRegistered(holder, term))
    for group in decision.state.where(Status.LEASED):
        if group.server == holder:
            requeue(decision, group, "lease_superseded", keep=True)


def requeue(decision: Decision, group: Group, reason: str, keep: bool = False) -> None:
    """Send a group to the front of the pending queue; one that is pending already only loses its kept samples.

    One that has lost as many leases as it may is dropped: it would take down server after server.
    """
    if group.status is Status.PENDING:
        if not keep:
            decision.emit(ev.KeptFreed(group.id, reason))
        return
    lost = group.status is Status.LEASED and reason not in ("returned", "stale_tokens")
    decision.emit(ev.GroupRequeued(group.id, reason, keep, lost))
    allowed = decision.state.spec.lease_attempts_max
    if allowed and reason in ev.LOST_LEASE and group.leases_lost >= allowed:
        detail = f"{group.leases_lost} leases were lost, the last at server {group.server}: {reason}"
        decision.emit(ev.GroupDropped(group.id, "quarantined", decision.state.head, detail))


def stored_answer(state: RunState, key: str, content: str) -> str | None:
    """Answer of an earlier call with this key; ALREADY_EXISTS if its content was another one."""
    known = state.answers.get(key)
    if known is None:
        return None
    if known.content != content:
        raise AlreadyExists(f"{key} was stored with other content; a repeat must carry the same bytes")
    return known.answer
