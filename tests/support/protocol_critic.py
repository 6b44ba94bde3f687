"""The critic in the step commit: it writes values before the actor trains, and is trained after the commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol_peers import Critic, Dcs, Groups

from relax_common.errors import Precondition
from relax_queue.rules import reading

if TYPE_CHECKING:
    from relax_queue.rules.state import RunState


class CriticMoves:
    """Moves of the critic over the state of the machine that it is mixed into."""

    critic: Critic | None
    dcs: Dcs
    state: RunState
    values: set[tuple[int, int, int]]

    if TYPE_CHECKING:

        @property
        def lags(self) -> bool: ...

        def payload_of(self, groups: Groups) -> tuple[str, ...]: ...

    def critic_goes_on(self) -> None:
        critic, dcs = self.critic, self.dcs
        if critic is None or critic.pc == "stuck":
            return
        if critic.pc == "load":
            critic.lineage, critic.content, critic.pc = dcs.lineage, dcs.best()[1], "at"
        elif critic.lineage != dcs.lineage:
            critic.pc = "load"
        elif dcs.head > len(critic.content):
            self.critic_trains(critic)
        elif not self.critic_settles(critic):
            self.critic_values(critic)

    def critic_settles(self, critic: Critic) -> bool:
        """Gives dcs the state of the head if one is due or dcs has lost it."""
        dcs, step, every = self.dcs, len(critic.content), self.state.spec.snapshot_every
        f = dcs.best()[0]
        held = (step, dcs.line[step].tag) in dcs.snapshots["critic"]
        if step > f and not held and (step % every == 0 or step + 1 - f > every):
            dcs.put_snapshot("critic", step, dcs.line[step].tag, critic.content)
            return True
        return False

    def critic_values(self, critic: Critic) -> None:
        step = len(critic.content)
        if self.lags:
            return
        if critic.pc == "valued":
            try:
                reading.find_plan(self.state, critic.lineage, step, 0, critic.generation)
            except Precondition as error:
                if error.reason != "PLAN_LOST":
                    raise
                critic.pc = "at"  # the step is planned again, and the actor waits for values of its new rows
            return
        answer = reading.find_plan(self.state, critic.lineage, step, 99, 0)
        if answer is not None and answer.close is not None and answer.plan is not None:
            self.values.add((critic.lineage, step, answer.plan.generation))
            critic.generation, critic.pc = answer.plan.generation, "valued"
            critic.payload = self.payload_of(answer.close.groups)

    def critic_trains(self, critic: Critic) -> None:
        """On the committed plan: gradients of a plan that was lost since are dropped."""
        step = len(critic.content)
        committed = self.dcs.line[step + 1]
        if critic.pc == "valued":
            if step + 1 == self.dcs.head and critic.generation != committed.tag[1]:
                critic.pc = "at"
                return
            assert critic.payload == committed.payload, "the critic's gradients are those of a plan that was lost"
        try:
            answer = reading.find_plan(self.state, critic.lineage, step, 99, 0)
        except Precondition as error:
            if error.reason not in ("ROWS_FREED", "PLAN_LOST"):
                raise
            if not self.lags:
                critic.pc = "load" if self.dcs.best()[0] > step else "stuck"
            return
        if answer is not None and answer.close is not None and step < self.state.head:
            assert answer.close.groups == committed.groups, "I7: the critic trains what was committed"
            assert self.payload_of(answer.close.groups) == committed.payload, "the critic trains other rows"
            critic.content += (answer.close.groups,)
            critic.pc = "at"
