"""What the protocol machine knows of a run from calls and answers alone; each transaction is compared with it."""

from __future__ import annotations

import json
from collections import Counter

from protocol_peers import Dcs, Server

from relax_common.versions import PolicyVersion
from relax_queue.broker.public_events import show
from relax_queue.rules import events as ev
from relax_queue.rules.group import Status
from relax_queue.rules.state import RunState
from relaxd.run.ledger import Ledger

LIVE = (Status.PENDING, Status.LEASED, Status.READY, Status.PLANNED)


class Books:
    """plans: every chunk ever logged. content: tokens by version of each sample, as put last. failures: leases that
    each group has lost. places: of the step being planned, by the plans that were logged.
    """

    state: RunState
    ledger: Ledger
    revision: int
    dcs: Dcs
    servers: list[Server]
    plans: dict[tuple[int, int, int], ev.ChunkPlanned]
    content: dict[tuple[str, int], dict[PolicyVersion, int]]
    failures: Counter[str]
    places: int

    def check_transaction(self, transaction: ev.Transaction) -> None:
        planned = [e for e in transaction.events if isinstance(e, ev.ChunkPlanned)]
        for e in transaction.events:
            if isinstance(e, ev.ChunkPlanned):
                known = self.plans.setdefault((e.step, e.generation, e.chunk), e)
                assert known == e, "I7: a chunk was planned in two ways under one generation"
                self.check_chunk(e)
                self.places += len(e.groups)
            elif isinstance(e, ev.StepClosed):
                self.places = self.state.spec.prompts_per_step
                self.check_closing(e, planned)
            elif isinstance(e, (ev.CommitFollowed, ev.PlanLost)):
                self.places = 0
            elif isinstance(e, ev.GroupLeased):
                self.check_lease(e)
            elif isinstance(e, ev.GroupRequeued) and e.reason in ("lease_expired", "lease_superseded"):
                self.failures[e.group] += 1
            elif isinstance(e, ev.GroupOffered):
                self.failures.pop(e.prompt.group, None)
            elif isinstance(e, ev.GroupMasked):
                assert self.state.spec.stale_policy == "mask"
            elif isinstance(e, (ev.GroupDropped, ev.GroupRequeued)) and e.reason == "too_stale":
                dropped = isinstance(e, ev.GroupDropped)
                assert self.state.spec.stale_policy in (("drop", "mask") if dropped else ("wait", "regenerate"))
                followed = any(isinstance(o, (ev.CommitFollowed, ev.RollbackFollowed)) for o in transaction.events)
                assert followed or self.state.spec.stale_policy != "wait", "the step waits for a straggler"
            elif isinstance(e, ev.GroupDropped) and e.reason == "quarantined":
                assert self.failures[e.group] >= self.state.spec.lease_attempts_max > 0, (
                    "I1: dropped without its reason"
                )
        limit = self.state.spec.lease_attempts_max
        at_large = [g for g, n in self.failures.items() if n >= limit > 0 and self.state.status_of(g) in LIVE]
        assert not at_large, "a group that loses lease after lease is quarantined"
        for message in show(transaction, self.revision):
            detail = json.loads(message.detail_json)
            self.ledger.apply(detail | {"source": "queue", "revision": 0, "kind": message.kind, "group": message.group})
        assert not self.ledger.faults, f"I1: {self.ledger.faults}"

    def trained_tokens(self, group: str, sample: int) -> dict[PolicyVersion, int]:
        """According to the machine's own books, after the newest plan's mask."""
        chunk = next(c for c in reversed(self.plans.values()) if group in c.groups)
        oldest = dict(zip(chunk.groups, chunk.oldest_trained, strict=False)).get(group, 0)
        return {v: n for v, n in self.content[group, sample].items() if v.number >= oldest}

    def check_chunk(self, chunk: ev.ChunkPlanned) -> None:
        spec = self.state.spec
        assert spec.stale_policy == "mask" or not chunk.oldest_trained, "I2: tokens leave the mask only by policy"
        rows = [key for rank in chunk.ranks for b in rank for key in b.rows]
        assert sorted(rows) == sorted((g, s, 0) for g in chunk.groups for s in range(2)), "I7: each row once"
        for group in chunk.groups:
            assert any(self.trained_tokens(group, s) for s in range(2)), "I2: nothing of it is left to train"
            for version in (v for s in range(2) for v in self.trained_tokens(group, s)):
                assert chunk.step - version.number <= spec.max_staleness, "I2: too stale"

    def check_closing(self, close: ev.StepClosed, planned: list[ev.ChunkPlanned]) -> None:
        tokens = [self.trained_tokens(group, s) for group in close.groups for s in range(2)]
        assert close.groups, "a step never closes empty"
        assert close.n_tokens == sum(sum(t.values()) for t in tokens), "denominators"
        assert close.n_samples == sum(bool(t) for t in tokens), "denominators"
        if self.state.spec.deterministic:
            assert len(planned) == close.n_chunks, "I7: chunks are cut only when the step closes"
            assert [g for c in planned for g in c.groups] == list(close.groups)

    def check_lease(self, lease: ev.GroupLeased) -> None:
        server = self.servers["ab".index(lease.server)]
        assert lease.term == server.term, "I8: a lease under an old term"
        followed = self.dcs.records[: self.state.applied_revision]
        confirmed = [r[3][1] for r in followed if r[:3] == ("confirm", server.name, server.term)]
        assert confirmed, "I6: an unconfirmed server got a lease"
        allowed = confirmed[-1] + self.state.spec.max_staleness
        kept = {s for g, s in self.content if g == lease.group} & set(self.state.groups[lease.group].samples)
        oldest = [v.number for s in kept for v in self.content[lease.group, s]]
        expected = min([allowed, *(v + self.state.spec.max_staleness for v in oldest)])
        assert lease.deadline == expected, "I3: min(confirmed, oldest kept token) + max_staleness"
