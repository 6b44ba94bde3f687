"""The events that clients may see: enough to rebuild the ledger without the broker's own totals."""

import json
from collections.abc import Callable
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from relax.queue.v1 import queue_pb2 as pb
from relax_common.versions import PolicyVersion
from relax_queue.rules import events as ev
from relax_queue.storage.journal import Journal

Shown = tuple[str, str, dict[str, Any]]  # kind, group, detail


def _leased(e: ev.GroupLeased) -> Shown:
    detail = {
        "server": e.server,
        "attempt": e.attempt,
        "deadline": e.deadline,
        "confirmed": str(PolicyVersion.unpack(e.confirmed)),
        "kept_discarded": e.discard_kept,
    }
    return "leased", e.group, detail


def _completed(e: ev.GroupCompleted) -> Shown:
    detail = {
        "server": e.server,
        "attempt": e.attempt,
        "samples": e.n_samples,
        "valid_samples": e.n_valid_samples,
        "oldest_version": e.oldest_version,
        "reward_mean": e.reward_mean,
        "generation_start": e.generation_start_unix_seconds,
        "generation_end": e.generation_end_unix_seconds,
    }
    return "completed", e.group, detail


def _requeued(e: ev.GroupRequeued) -> Shown:
    return "lease_lost" if e.lease_lost else "sent_back", e.group, {"reason": e.reason, "kept": e.keep}


def _closed(e: ev.StepClosed) -> Shown:
    detail = {
        "step": e.step,
        "generation": e.generation,
        "groups": e.groups,
        "plan_digest": e.plan_digest,
        "tokens": e.n_tokens,
        "samples": e.n_samples,
        "short_reason": e.short_reason,
    }
    return "step_closed", "", detail


def _commit(e: ev.CommitFollowed) -> Shown:
    detail = {"dcs_revision": e.revision, "step": e.step, "version": e.version, "lineage": e.lineage, "whole": e.whole}
    return "head", "", detail


def _rollback(e: ev.RollbackFollowed) -> Shown:
    return "head", "", {"dcs_revision": e.revision, "version": e.head, "lineage": e.lineage, "rollback": True}


_SHOW: dict[type, Callable[[Any], Shown]] = {
    ev.RunOpened: lambda e: ("run_state", "", {"state": "open", "recipe_digest": e.recipe_digest}),
    ev.RunLengthened: lambda e: ("run_state", "", {"state": "open", "total_steps": e.total_steps}),
    ev.RunSealed: lambda e: ("run_state", "", {"state": "draining"}),
    ev.RunEnded: lambda e: ("run_state", "", {"state": "ended"}),
    ev.PayloadLost: lambda e: ("run_state", "", {"state": "restarted"}),
    ev.GroupOffered: lambda e: ("offered", e.prompt.group, {"again": e.again, "position": e.prompt.position}),
    ev.GroupLeased: _leased,
    ev.GroupCompleted: _completed,
    ev.GroupRequeued: _requeued,
    ev.GroupDropped: lambda e: ("dropped", e.group, {"reason": e.reason, "step": e.step, "detail": e.detail}),
    ev.GroupMasked: lambda e: ("masked", e.group, {"oldest_trained": e.oldest_trained, "deadline": e.deadline}),
    ev.GroupUnplanned: lambda e: ("plan_lost", e.group, {"reason": e.reason}),
    ev.GroupTrained: lambda e: ("trained", e.group, {"step": e.step}),
    ev.GroupReturned: lambda e: ("returned", e.group, {}),
    ev.GroupRolledBack: lambda e: ("rolled_back", e.group, {}),
    ev.StepClosed: _closed,
    ev.PlanLost: lambda e: ("plan_lost", "", {"step": e.step, "generation": e.generation, "reason": e.reason}),
    ev.CommitFollowed: _commit,
    ev.RollbackFollowed: _rollback,
}


def messages_after(journal: Journal, revision: int) -> tuple[list[pb.WatchEventsResponse], int]:
    """The next durable events after a revision, in order, and the revision up to which all events were examined.

    If there are no messages, all durable events were examined and those after `revision` are internal. Raises
    EventsCompacted if the events are no longer kept.
    """
    while journal.has_after(revision):
        first, transaction = journal.transaction_after(revision)
        messages = [m for m in show(transaction, first) if m.revision > revision]
        revision = first + ev.width(transaction) - 1
        if messages:
            return messages, revision
    return [], revision


def show(transaction: ev.Transaction, first_revision: int) -> list[pb.WatchEventsResponse]:
    """Messages for the events of a transaction; internal events take a revision but are not shown."""
    time = Timestamp()
    time.FromNanoseconds(int(transaction.unix_seconds * 1e9))
    messages = []
    revision = first_revision
    for event in transaction.events:
        shown = _shown(event)
        for kind, group, detail in shown:
            text = json.dumps(detail)
            messages.append(
                pb.WatchEventsResponse(revision=revision, time=time, kind=kind, group=group, detail_json=text)
            )
            revision += 1
        revision += not shown
    return messages


def _shown(event: ev.Event) -> list[Shown]:
    if isinstance(event, ev.ChunkPlanned):
        detail = {"step": event.step, "chunk": event.chunk, "generation": event.generation}
        return [("planned", group, detail) for group in event.groups]
    function = _SHOW.get(type(event))
    return [function(event)] if function else []
