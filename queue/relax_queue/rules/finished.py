"""Groups whose end no replay can change any more: a line each instead of an object, since a run may have millions."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from relax_queue.rules.group import Group, Status


@dataclass(frozen=True, slots=True)
class SettledGroup:
    """What an offer, a rollback or a person may still ask of it."""

    id: str
    order: int
    status: Status
    step: int
    attempts: int
    reason: str
    prompt_digest: int


@dataclass(slots=True)
class Settled:
    """Trained and dropped groups of steps before F. Only a rollback past F brings one back."""

    groups: dict[str, SettledGroup] = field(default_factory=dict)
    counts: dict[Status, int] = field(default_factory=dict)

    def get(self, group: str) -> SettledGroup | None:
        return self.groups.get(group)

    def count(self, status: Status) -> int:
        return self.counts.get(status, 0)

    def add(self, group: Group) -> None:
        self.restore(
            SettledGroup(
                group.id, group.order, group.status, group.step, group.attempts, group.reason, group.prompt.digest
            )
        )

    def restore(self, settled: SettledGroup) -> None:
        self.groups[settled.id] = settled
        self.counts[settled.status] = self.count(settled.status) + 1

    def take(self, group: str) -> SettledGroup | None:
        settled = self.groups.pop(group, None)
        if settled is not None:
            self.counts[settled.status] -= 1
            if not self.counts[settled.status]:
                del self.counts[settled.status]
        return settled

    def since(self, step: int) -> Iterable[SettledGroup]:
        """Those that ended in `step` or later."""
        return [g for g in self.groups.values() if g.step >= step]
