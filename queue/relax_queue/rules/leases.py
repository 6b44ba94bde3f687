"""Leases: granting under the admission rule, renewing, running out, returning."""

from dataclasses import dataclass

from relax_common.errors import LeaseGone
from relax_queue.rules import events as ev
from relax_queue.rules.admission import deadline, fits
from relax_queue.rules.group import Group, Status
from relax_queue.rules.state import Phase, RunState
from relax_queue.rules.transaction import Decision, fence, requeue


@dataclass(frozen=True, slots=True)
class Refused:
    """Why no lease is granted now; `reason` is one of few words, `message` names what is missing."""

    reason: str
    message: str


def grant(decision: Decision, server: str, term: int) -> Group | Refused:
    """Lease the first pending group to a server that has confirmed a version (I3, I4, I6).

    Kept tokens that no longer fit are discarded here; they never refuse the lease.
    """
    state = decision.state
    fence(decision, server, term)
    confirmed = state.confirmed.get(server)
    if confirmed is None or confirmed.term != term:
        return Refused("unconfirmed", f"server {server} has not confirmed a version under term {term}")
    group = state.front()
    if group is None or state.phase is Phase.ENDED:
        return Refused("no_group", "no group is pending: relaxd offers them, or the run is at its end")
    spec, head, taken = state.spec, state.head, state.places_taken()
    opened = [g.deadline for g in state.open_groups()]

    def fit(d: int) -> bool:
        return fits([*opened, d], head, spec.prompts_per_step, taken)

    kept = group.oldest_version()
    discard = kept is not None and not fit(kept + spec.max_staleness)
    due = deadline(confirmed.version.number, None if discard else kept, spec.max_staleness)
    if not fit(due):
        return Refused(
            "staleness",
            f"{len(opened)} groups are open, {taken} places of step {head} are planned: one more with deadline {due} "
            f"would be trained too late; the actor must commit step {head} first",
        )
    if not group.reserved and (state.n_reserved + 1) * spec.bytes_per_group > spec.memory_budget_bytes:
        return Refused(
            "bytes",
            f"{state.n_reserved} groups hold the byte budget; F is version {state.frontier}, and dcs must announce a "
            f"newer one, on its disk if it keeps a recovery copy, before their rows are freed",
        )
    packed = confirmed.version.pack()
    decision.emit(ev.GroupLeased(group.id, server, term, group.attempts + 1, packed, due, discard))
    return group


def grant_some(decision: Decision, server: str, term: int, credits: int) -> list[Group] | Refused:
    """Up to `credits` leases in one transaction; why there is none if not even one is granted."""
    groups: list[Group] = []
    while len(groups) < credits:
        result = grant(decision, server, term)
        if isinstance(result, Refused):
            return groups or result
        groups.append(result)
    return groups


def leased(state: RunState, server: str, term: int, group: str, attempt: int) -> Group:
    """The group of a lease that is still held."""
    found = state.groups.get(group)
    if not holds(found, server, term, attempt) or found is None:
        raise LeaseGone(
            f"lease {group}/{attempt} of {server} is gone: it ran out, was revoked or belongs to another term",
        )
    return found


def holds(group: Group | None, server: str, term: int, attempt: int) -> bool:
    return (
        group is not None
        and group.status is Status.LEASED
        and (group.server, group.term, group.attempts) == (server, term, attempt)
    )


def expire(decision: Decision, group: str, attempt: int) -> None:
    """A lease ran out: the group goes to the front with its complete samples."""
    found = decision.state.groups.get(group)
    if found is not None and found.status is Status.LEASED and found.attempts == attempt:
        requeue(decision, found, "lease_expired", keep=True)
