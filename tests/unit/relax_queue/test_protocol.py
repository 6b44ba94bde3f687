"""The step-commit protocol with crashes at every arrow: the broker's own state machine among pure models of its peers.

A rule is one atomic step of one process; a process may die between any two. The broker dies by reading its log again,
also after a snapshot of any age, with its payload lost (`metadata`) or kept but for a block (`full`). dcs, actor and
rollout servers are the smallest models that keep their side of the contract; what the machine believes of groups, rows
and versions is its own bookkeeping of calls and answers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from protocol_books import Books
from protocol_critic import CriticMoves
from protocol_peers import Actor, Commit, Critic, Dcs, Groups, Server

from relax_common.errors import AlreadyExists, Precondition, StaleTerm
from relax_common.versions import PolicyVersion
from relax_queue.rows.facts import facts_of_rows, facts_of_samples
from relax_queue.rows.row_keys import keys_of_samples
from relax_queue.rows.spec import RunSpec
from relax_queue.rules import events as ev
from relax_queue.rules import following, leases, lifecycle, reading
from relax_queue.rules.apply import fold, opened
from relax_queue.rules.group import Group, Status
from relax_queue.rules.planning import closing_due, plan
from relax_queue.rules.puts import PutCommand, put
from relax_queue.rules.state import RunState
from relax_queue.rules.transaction import Decision, fence
from relax_queue.storage import snapshots
from relaxd.run.ledger import Ledger

FAULTS_MAX = 25
OUTCOMES = ["ok"] * 8 + ["no_signal", "failed", "part", "part", "return", "return_part"]
CRASHES = (
    ["actor", "freeze", "dcs", "a", "b", "lease", "lease", "actor+queue", "queue+dcs", "critic"]
    + ["actor+critic", "critic+dcs", "actor+critic+dcs"]
    + 2 * ["actor+dcs"]
    + 4 * ["queue"]
)
STEPS = {
    "follow": 6.0,
    "actor": 10.0,
    "critic": 10.0,
    **{f"{what} {server}": 3.0 for what in ("swap", "lease", "put") for server in "ab"},
    "frozen": 0.5,
    "relaxd": 2.0,
    "crash": 1.6,
    "seal": 0.02,
    "due": 0.5,
    "late_offer": 0.3,
    "lull": 0.4,
    "stall": 1.0,
}


class Protocol(CriticMoves, Books, RuleBasedStateMachine):
    @initialize(
        max_staleness=st.integers(0, 2),
        per_step=st.integers(1, 2),
        chunk=st.integers(1, 2),
        snapshot_every=st.integers(1, 2),
        policy=st.sampled_from(["wait", "drop", "mask", "mask", "regenerate"]),
        packer=st.sampled_from(["sequential", "whole_groups", "length_balanced", "token_budget"]),
        durability=st.sampled_from(["metadata", "full"]),
        deterministic=st.booleans(),
        closing=st.sampled_from(["all", "all", "min_n"]),
        attempts=st.sampled_from([0, 0, 1, 2]),
        refills=st.integers(0, 1),
        n_groups=st.integers(6, 30),
        with_critic=st.booleans(),
    )
    def begin(  # type: ignore[no-untyped-def]
        self, max_staleness, per_step, chunk, snapshot_every, policy, packer, durability, deterministic, closing,  # noqa: ANN001
        attempts, refills, n_groups, with_critic,  # noqa: ANN001
    ) -> None:  # fmt: skip
        spec = RunSpec(
            fields=(), consumers=(), tokens_per_row_max=8, tokens_per_microbatch=8, data_parallel_size=2,
            prompts_per_step=per_step, samples_per_prompt=2, max_staleness=max_staleness,
            snapshot_every=snapshot_every, groups_per_chunk=min(chunk, per_step), packer=packer,
            stale_policy=policy, min_valid_samples=1, max_refills_per_step=refills, memory_budget_bytes=0,
            lease_ttl_seconds=1.0, durability=durability, deterministic=deterministic, closing=closing,
            closing_min_prompts=1 if closing == "min_n" else 0, closing_deadline_seconds=1.0,
            lease_attempts_max=attempts, seed=5,
        )  # fmt: skip
        # Exactly what I4 asks for: the machine fails if more is ever held.
        spec = replace(spec, memory_budget_bytes=spec.bytes_needed)
        first = ev.RunOpened("run", "digest", spec, "dcs")
        self.log = [ev.Transaction(0.0, (first,))]
        self.state = opened(first)
        self.ledger, self.revision = Ledger(), 1
        self.plans: dict[tuple[int, int, int], ev.ChunkPlanned] = {}
        self.dcs, self.faults = Dcs(), 0
        self.dcs.line.append(Commit(0, (), (0, 0)))
        self.dcs.records.append(("commit", None, (0, 0), (), ""))
        self.actor: Actor | None = Actor(1)
        self.zombie: Actor | None = None
        self.critic: Critic | None = Critic() if with_critic else None
        self.with_critic = with_critic
        if with_critic:
            self.dcs.snapshots["critic"] = {}
        self.values: set[tuple[int, int, int]] = set()  # lineage, step, generation of plans whose rows have values
        self.term = 1
        self.memory: set[int] = set()  # blocks whose bytes the broker holds
        self.content: dict[tuple[str, int], dict[PolicyVersion, int]] = {}  # tokens by version of each sample put last
        self.stalls = [0, 0]  # how many turns each server still misses its puts
        self.lull = 0  # turns left in which no server asks for a lease
        self.places = 0  # of the step being planned, by the plans that were logged
        self.failures: Counter[str] = Counter()  # leases that each group has lost
        self.servers = [Server("a"), Server("b")]
        self.prompts = [ev.Prompt(f"g{i}", 0, i, "1", None, "") for i in range(n_groups)]
        self.decide(lambda d: lifecycle.offer(d, "relaxd", 1, self.prompts, 0))
        self.owes_offer = 0

    # The broker's edge: decide, plan, log.

    def decide(self, command: Any) -> Any:
        decision = Decision(self.state)
        try:
            return command(decision)
        finally:
            if decision.events:
                plan(decision)
                transaction = ev.load(ev.dump(ev.Transaction(1.0, tuple(decision.events))))
                self.log.append(transaction)
                self.check_transaction(transaction)

    @property
    def lags(self) -> bool:
        return self.state.applied_revision < len(self.dcs.records)

    def queue_follows(self) -> None:
        if self.lags:
            revision = self.state.applied_revision + 1
            self.apply_record(revision)
            before = len(self.log)
            self.apply_record(revision)
            assert len(self.log) == before, "a record that is applied again changes nothing"

    def apply_record(self, revision: int) -> None:
        kind, *r = self.dcs.records[revision - 1]
        if kind == "commit":
            self.decide(lambda d: following.commit(d, revision, *r))
        elif kind == "confirm":
            self.decide(lambda d: following.confirm(d, revision, r[0], r[1], r[2]))
        elif kind == "snapshot":
            self.decide(lambda d: following.frontier(d, revision, r[0]))
        else:
            self.decide(lambda d: following.rollback(d, revision, r[0], r[1]))

    # Rollout servers.

    def head_version(self) -> PolicyVersion:
        return PolicyVersion(self.dcs.line[-1].lineage, self.dcs.head)

    def server_swaps_and_confirms(self, i: int) -> None:
        server, head = self.servers[i], self.head_version()
        if self.dcs.holds_head and server.serving != head:
            server.serving = head
        elif server.serving == head and server.confirmed != (server.term, head):
            server.confirmed = (server.term, head)
            self.dcs.records.append(("confirm", server.name, server.term, (head.lineage, head.number)))

    def server_leases(self, i: int) -> None:
        server = self.servers[i]
        if server.lease or server.serving is None or self.lull:
            self.lull = max(0, self.lull - 1)
            return
        group = self.decide(lambda d: leases.grant(d, server.name, server.term))
        if isinstance(group, Group):
            assert server.confirmed is not None, "I6: an unconfirmed server got a lease"
            server.lease = (group.id, group.attempts, server.serving)
            server.missing = tuple(s for s in range(2) if s not in group.samples)

    def command(
        self, server: Server, outcome: str | None, samples: tuple[int, ...], returns: bool = False
    ) -> PutCommand:
        assert server.lease is not None
        assert server.serving is not None
        group, attempt, began = server.lease
        versions = sorted({began.pack(), server.serving.pack()})
        tokens = {version: i + 1 for i, version in enumerate(versions)}
        rows = facts_of_rows(keys_of_samples(group, samples), [3 + s for s in samples], [tokens] * len(samples))
        facts = facts_of_samples(samples, [True] * len(samples), [1.0] * len(samples))
        digest = f"{group} {attempt} {samples} {versions} {outcome}"
        return PutCommand(server.name, server.term, group, attempt, rows, facts, (), 64, digest, outcome, returns)  # type: ignore[arg-type]

    def server_puts(self, i: int, how: str) -> None:
        server = self.servers[i]
        if server.lease is None or server.serving is None or self.state.is_ahead(server.serving):
            return
        group, attempt, _ = server.lease
        found = self.state.groups.get(group)
        missing = server.missing
        if how == "part":
            command = self.command(server, None, missing[:1])
            if len(missing) < 2:
                return
        elif how.startswith("return"):
            command = self.command(server, None, missing[:1] if how == "return_part" else (), returns=True)
        else:
            command = self.command(server, how, missing)
        held = leases.holds(found, server.name, server.term, attempt)
        books = dict(self.content)
        for sample in command.samples:
            versions = sorted({server.lease[2], server.serving})
            self.content[group, sample] = {version: i + 1 for i, version in enumerate(versions)}
        try:
            disposition, block = self.decide(lambda d: put(d, command))
        except Precondition as error:
            server.lease, self.content = None, books
            if held or error.reason not in ("LEASE_GONE", "STALE_TERM"):
                raise
            return
        if block is not None:
            self.memory.add(block)
        assert held, "I8: a put without a lease was taken"
        before = len(self.log)
        assert self.decide(lambda d: put(d, command))[0] == disposition, "the stored answer"
        other = replace(command, digest="other")
        with pytest.raises(AlreadyExists):
            self.decide(lambda d: put(d, other))
        assert len(self.log) == before
        server.missing = missing[1:]
        if how != "part":
            server.lease = None

    # The actor.

    def step_of(self, actor: Actor) -> None:
        """One step of an incarnation, real or frozen and replaced."""
        dcs = self.dcs
        if actor.term < dcs.term:
            self.exit(actor)
        elif actor.pc == "boot":
            dcs.term, dcs.attempt = actor.term, None
            try:
                self.decide(lambda d: fence(d, "actor", actor.term))
            except StaleTerm:
                self.exit(actor)
                return
            actor.pc = "load"
        elif actor.pc == "load":
            actor.lineage, actor.content = dcs.lineage, dcs.best()[1]
            actor.pc = "replay"
        elif actor.pc == "sent":
            step = len(actor.content)
            stored = actor.lineage == dcs.lineage and dcs.head > step and dcs.line[step + 1].tag == actor.tag
            if stored:
                actor.content += (actor.groups,)
            actor.pc = "idle" if stored else "trained"
        elif actor.pc != "stuck":
            if actor.lineage != dcs.lineage or (actor.pc != "replay" and len(actor.content) != dcs.head):
                actor.pc = "load"
            else:
                getattr(self, f"actor_{actor.pc}")(actor)

    def exit(self, actor: Actor) -> None:
        if actor is self.zombie:
            self.zombie = None
        else:
            self.actor = None

    def read_plan(self, actor: Actor, step: int, chunk: int, generation: int) -> reading.PlanAnswer | None:
        self.state.terms.check("actor", actor.term)
        return reading.find_plan(self.state, actor.lineage, step, chunk, generation)

    def actor_replay(self, actor: Actor) -> None:
        step = len(actor.content)
        if step == self.dcs.head:
            actor.pc = "idle"
            return
        try:
            answer = self.read_plan(actor, step, 99, 0)
        except Precondition as error:
            if error.reason not in ("ROWS_FREED", "PLAN_LOST"):
                raise
            if not self.lags:
                actor.pc = "load" if self.dcs.best()[0] > step else "stuck"
            return
        if answer is not None and answer.close is not None and step < self.state.head:
            assert answer.close.groups == self.dcs.line[step + 1].groups, "I7: a replay reads the committed plan"
            assert self.payload_of(answer.close.groups) == self.dcs.line[step + 1].payload, "a replay reads other rows"
            actor.content += (answer.close.groups,)

    def payload_of(self, groups: Groups) -> tuple[str, ...]:
        parts = [part for g in groups for part in self.state.group(g).parts]
        assert all(part.block in self.memory for part in parts), "rows that are shown as there are gone"
        return tuple(part.digest for part in parts)

    def actor_idle(self, actor: Actor) -> None:
        dcs, step = self.dcs, len(actor.content)
        f = dcs.best()[0]
        if not dcs.holds_head:
            dcs.holds_head = True
        elif step > f and (step % self.state.spec.snapshot_every == 0 or step + 1 - f > self.state.spec.snapshot_every):
            dcs.put_snapshot("actor", step, dcs.line[step].tag, actor.content)
        elif not self.lags:
            answer = self.read_plan(actor, step, 99, 0)
            if answer is None or answer.close is None or answer.plan is None:
                return
            if self.with_critic and (actor.lineage, step, answer.plan.generation) not in self.values:
                return
            actor.groups, actor.digest = answer.close.groups, answer.close.plan_digest
            actor.payload = self.payload_of(actor.groups)
            actor.tag, actor.pc = (actor.term, answer.plan.generation), "half"
            for chunk in answer.plan.chunks:
                planned = {key[0] for rank in chunk.ranks for b in rank for key in b.rows}
                assert planned == set(chunk.groups), "I7: rows of whole groups"
            for group in map(self.state.group, actor.groups):
                assert group.status is Status.PLANNED
                for v in (v for s in range(2) for v in self.trained_tokens(group.id, s)):
                    assert step - v.number <= self.state.spec.max_staleness, "I2: too stale"
                    assert dcs.line[v.number].lineage == v.lineage, "I2: a token off the line"

    def actor_half(self, actor: Actor) -> None:
        if self.lags:
            return
        try:
            self.read_plan(actor, len(actor.content), 0, actor.tag[1])
            actor.pc = "trained"
        except Precondition as error:
            if error.reason != "PLAN_LOST":
                raise
            actor.pc = "idle"

    def actor_trained(self, actor: Actor) -> None:
        self.dcs.attempt = (actor.term, len(actor.content) + 1, actor.tag)
        actor.pc = "staged"

    def actor_staged(self, actor: Actor) -> None:
        dcs, step, every = self.dcs, len(actor.content), self.state.spec.snapshot_every
        state_after = (*actor.content, actor.groups)
        if (step + 1) % every == 0 and (step + 1, actor.tag) not in dcs.snapshots["actor"]:
            dcs.put_snapshot("actor", step + 1, actor.tag, state_after)
        elif step + 1 - dcs.best()[0] > every:
            dcs.put_snapshot("actor", step, dcs.line[step].tag, actor.content)
        elif dcs.attempt != (actor.term, step + 1, actor.tag):
            actor.pc = "trained"
        else:
            assert actor.content == dcs.content(), "I1: a commit from a state that is not the head"
            done = {g for c in dcs.line for g in c.groups}
            assert done.isdisjoint(actor.groups), "I1: a group is trained twice in one lineage"
            dcs.line.append(Commit(actor.lineage, actor.groups, actor.tag, actor.payload))
            dcs.records.append(("commit", step, (actor.lineage, step + 1), actor.groups, actor.digest))
            dcs.holds_head, dcs.attempt = True, None
            dcs.note_frontier()
            actor.pc = "sent"

    def actor_goes_on(self) -> None:
        if self.actor is not None:
            self.step_of(self.actor)

    def frozen_actor_goes_on(self) -> None:
        if self.zombie is not None:
            before, records = self.dcs.term, len(self.dcs.records)
            old = self.zombie
            self.step_of(old)
            if old.term < before:
                assert self.zombie is None, "I8: the frozen actor hears STALE_TERM and exits"
                assert len(self.dcs.records) == records

    # relaxd.

    def relaxd_acts(self) -> None:
        if self.actor is None:
            self.term += 1
            self.actor = Actor(self.term)
        elif self.with_critic and self.critic is None:
            self.critic = Critic()
        elif self.actor.pc == "stuck" or (self.critic is not None and self.critic.pc == "stuck"):
            head = self.dcs.best()[0]
            self.dcs.lineage += 1
            del self.dcs.line[head + 1 :]
            self.dcs.frontier = head
            self.dcs.attempt, self.dcs.holds_head = None, False
            self.dcs.records.append(("rollback", self.dcs.lineage, head))
            self.owes_offer = len(self.dcs.records)
            self.actor.pc = "load"
            if self.critic is not None:
                self.critic.pc = "load"
        elif self.owes_offer and self.state.applied_revision >= self.owes_offer:
            again = [p for p in self.prompts if self.state.status_of(p.group) is Status.ROLLED_BACK]
            self.decide(lambda d: lifecycle.offer(d, "relaxd", 1, again, self.owes_offer))
            self.owes_offer = 0

    @rule(random_seed=st.integers(0, 2**32), n=st.integers(100, 300))
    def run_goes_on(self, random_seed: int, n: int) -> None:
        # Long scripts from one number: drawn step by step they would stay too short to reach the rare states. Each
        # process gets a speed of its own, so that some lag far behind.
        random = Random(random_seed)
        speeds = [weight * random.random() ** 2 for weight in STEPS.values()]
        for step in random.choices(list(STEPS), speeds, k=n):
            name, _, who = step.partition(" ")
            i = "ab".find(who)
            if name == "crash":
                # If the queue is lost while a step is trained, the rules for commits of lost plans apply.
                committing = self.actor is not None and self.actor.pc in ("trained", "staged")
                victims = "queue" if committing and random.random() < 0.7 else random.choice(CRASHES)
                for victim in victims.split("+"):
                    self.crash(victim)
            elif name == "put" and self.stalls[i]:
                self.stalls[i] -= 1
            elif name == "put":
                self.server_puts(i, random.choice(OUTCOMES))
            elif name in ("swap", "lease"):
                (self.server_swaps_and_confirms if name == "swap" else self.server_leases)(i)
            else:
                {
                    "follow": self.queue_follows,
                    "actor": self.actor_goes_on,
                    "critic": self.critic_goes_on,
                    "frozen": self.frozen_actor_goes_on,
                    "relaxd": self.relaxd_acts,
                    "seal": self.run_is_sealed,
                    "due": self.closing_deadline_passes,
                    "late_offer": self.an_old_offer_arrives,
                    "lull": self.nobody_leases_for_a_while,
                    "stall": lambda: self.a_server_stalls(random.randrange(2)),
                }[name]()
            self.the_open_set_fits()

    @rule(random_seed=st.integers(0, 2**32), n=st.integers(0, 14))
    def the_queue_is_lost_under_a_trained_step(self, random_seed: int, n: int) -> None:
        """Its groups are generated again, partly and with another end, before the lost plan is committed."""
        random = Random(random_seed)
        for _ in range(40):
            if self.actor is not None and self.actor.pc == "staged":
                break
            self.relaxd_acts()
            self.critic_goes_on()
            self.actor_goes_on()
            for i in (0, 1):
                self.server_swaps_and_confirms(i)
                self.server_leases(i)
                self.server_puts(i, "ok")
            self.queue_follows()
        self.crash("queue")
        for _ in range(n):
            i = random.randrange(2)
            self.server_leases(i)
            self.server_puts(i, random.choice(["ok", "ok", "failed", "no_signal", "part"]))
            self.the_open_set_fits()
        for _ in range(4):
            self.actor_goes_on()
        while self.lags:
            self.queue_follows()
            self.the_open_set_fits()

    def an_old_offer_arrives(self) -> None:
        """Repeats relaxd's first offer, which was made before any rollback."""
        known = self.decide(lambda d: lifecycle.offer(d, "relaxd", 1, self.prompts, 0))
        if self.state.rollback_revision:
            assert known == (0, len(self.prompts)), "a group is rolled back and an offer from before takes it"

    def a_server_stalls(self, i: int) -> None:
        """Its groups become stragglers."""
        self.stalls[i] = 15

    def nobody_leases_for_a_while(self) -> None:
        self.lull = 12

    def closing_deadline_passes(self) -> None:
        if self.state.spec.closing == "min_n":
            self.decide(lambda d: closing_due(d, self.state.head))

    def run_is_sealed(self) -> None:
        self.decide(lifecycle.seal)

    # Crashes.

    def crash(self, who: str) -> None:
        if self.faults == FAULTS_MAX:
            return
        self.faults += 1
        if who == "queue":
            self.queue_restarts()
        elif who == "dcs":
            self.dcs.attempt, self.dcs.holds_head = None, False
            for held in self.dcs.snapshots.values():
                held.clear()
        elif who == "lease":
            for group in self.state.where(Status.LEASED)[:1]:
                self.decide(lambda d, g=group: leases.expire(d, g.id, g.attempts))
        elif who in "ab":
            server = self.servers["ab".index(who)]
            old = server.term
            server.term, server.serving, server.lease, server.confirmed = server.term + 1, None, None, None
            self.decide(lambda d: fence(d, server.name, server.term))
            with pytest.raises(StaleTerm):
                self.decide(lambda d: leases.grant(d, server.name, old))
        elif who == "critic":
            self.critic = None
        else:
            if who == "freeze" and self.zombie is None and self.actor is not None:
                self.zombie = self.actor
            self.actor = None

    def queue_restarts(self) -> None:
        """From the whole log and from a snapshot of any age with the log after it: the same state."""
        recovered = fold(self.log)
        assert recovered == self.state, "the state is the fold of the log"
        at = self.faults * 7919 % len(self.log) + 1
        earlier = fold(self.log[:at])
        assert earlier is not None
        assert fold(self.log[at:], snapshots.load(snapshots.dump(snapshots.take_image(earlier)))) == recovered
        self.state = recovered
        full, before = recovered.spec.durability == "full", len(self.log)
        self.memory &= set(recovered.blocks)
        if not full:
            self.memory.clear()
        elif self.memory and self.faults % 3 == 0:
            self.memory.pop()  # damaged on disk
        whole = full and self.memory == set(recovered.blocks)
        self.decide(lambda d: lifecycle.restart(d, set(self.memory) if full else None))
        if whole:
            assert [e for t in self.log[before:] for e in t.events] == [ev.PayloadLost(())], "nothing is made again"

    # Invariants and the end.

    @invariant()
    def the_open_set_fits(self) -> None:
        state: RunState = self.state
        opened = [g.deadline for g in state.open_groups()]
        size = state.spec.prompts_per_step
        if state.head >= 0:
            # Not by the queue's own predicate: here places are given out one by one.
            step, free = state.head, size - self.places
            for deadline in sorted(opened):
                step, free = (step, free) if free else (step + 1, size)
                assert step <= deadline, "I3: an open group would be trained too late"
                free -= 1
        assert len(opened) <= (state.spec.max_staleness + 1) * size, "I3"
        for group in state.where(Status.LEASED):
            assert group.term == self.servers["ab".index(group.server)].term, "I8: a lease of a server that is gone"
        reserved = [g for g in state.groups.values() if g.reserved]
        assert len(reserved) * state.spec.bytes_per_group <= state.spec.memory_budget_bytes, "I4"
        assert {p.block for g in reserved for p in g.parts} == set(state.blocks), "I4: bytes without a reservation"
        assert set(state.blocks) <= self.memory, "rows that are shown as there are gone"

    def done(self) -> bool:
        ends = (Status.TRAINED, Status.DROPPED)
        return not self.lags and not self.owes_offer and self.state.count(*ends) == len(self.prompts)

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        self.faults, self.lull = FAULTS_MAX, 0
        self.run_is_sealed()
        for _ in range(1200):
            if self.done():
                break
            self.relaxd_acts()
            self.critic_goes_on()
            self.actor_goes_on()
            self.frozen_actor_goes_on()
            for i in (0, 1):
                self.server_swaps_and_confirms(i)
                self.server_leases(i)
                self.server_puts(i, "ok")
            self.queue_follows()
            self.the_open_set_fits()
            orphan = [
                g for g in self.state.where(Status.LEASED) if g.id not in [s.lease[0] for s in self.servers if s.lease]
            ]
            for group in orphan:
                self.decide(lambda d, g=group: leases.expire(d, g.id, g.attempts))
        assert self.done(), (
            f"I5: the run cannot end: {reading.plan_missing(self.state, self.state.lineage, self.state.head)}"
        )
        trained = sorted(g for c in self.dcs.line for g in c.groups)
        known = [p.group for p in self.prompts if self.state.status_of(p.group) is Status.TRAINED]
        assert trained == sorted(known), "I1: the ledger is the line"
        assert fold(self.log) == self.state


def test_I1_I2_I3_I7_I8_hold_with_crashes_at_every_arrow_and_the_run_ends() -> None:
    profile = settings(
        max_examples=120,
        stateful_step_count=8,
        deadline=None,
        database=None,
        # A failure is replayed from the calls that it prints; shrinking scripts made from numbers would take minutes.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(20)(Protocol), settings=profile)
