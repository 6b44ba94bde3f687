"""State of one run as the fold of its events; `apply` is the only writer."""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from relax_common.errors import UnknownGroup
from relax_common.terms import Terms
from relax_common.versions import PolicyVersion
from relax_queue.rows.facts import NO_ROWS, NO_SAMPLES
from relax_queue.rows.spec import RunSpec
from relax_queue.rules.admission import on_line
from relax_queue.rules.events import ChunkPlanned, StepClosed
from relax_queue.rules.finished import Finished
from relax_queue.rules.group import Group, Status


class Phase(StrEnum):
    """OPEN takes groups, DRAINING takes no new groups, ENDED does nothing."""

    OPEN = "open"
    DRAINING = "draining"
    ENDED = "ended"


@dataclass(slots=True)
class StepPlan:
    """Plan of one step; `whole` is false once its rows are gone."""

    lineage: int
    step: int
    generation: int
    chunks: list[ChunkPlanned] = field(default_factory=list)
    close: StepClosed | None = None
    whole: bool = True

    def groups(self) -> list[str]:
        return [g for chunk in self.chunks for g in chunk.groups]


@dataclass(slots=True)
class Answer:
    content: str
    answer: str


@dataclass(slots=True)
class Confirmation:
    term: int
    version: PolicyVersion


@dataclass(slots=True)
class RunState:
    """Everything durable of one run.

    line[v] is the lineage that made version v; the head is its last entry. Rows of steps >= `frontier` (F) are kept;
    groups that ended before it are finished. closing_due: the step whose closing deadline has passed.
    """

    run: str
    recipe_digest: str
    spec: RunSpec
    dcs_address: str
    phase: Phase = Phase.OPEN
    terms: Terms = field(default_factory=Terms)
    groups: dict[str, Group] = field(default_factory=dict)
    finished: Finished = field(default_factory=Finished)
    waiting: list[tuple[int, str]] = field(default_factory=list)
    by_status: dict[Status, dict[str, None]] = field(default_factory=lambda: {s: {} for s in Status})
    blocks: dict[int, int] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)
    line: list[int] = field(default_factory=list)
    lineage: int = 0
    frontier: int = 0
    applied_revision: int = 0
    rollback_revision: int = 0
    confirmed: dict[str, Confirmation] = field(default_factory=dict)
    plan: StepPlan | None = None
    generation: int = 1
    closing_due: int = -1
    kept: dict[int, StepPlan] = field(default_factory=dict)
    drops_by_step: dict[int, int] = field(default_factory=dict)
    dropped_by_reason: dict[str, int] = field(default_factory=dict)
    next_order: int = 0
    next_block: int = 1
    n_admitted: int = 0
    n_offered: int = 0
    n_leases_lost: int = 0
    n_reserved: int = 0
    last_offered: str = ""

    @property
    def head(self) -> int:
        """Number of the head; -1 before version 0 is committed."""
        return len(self.line) - 1

    @property
    def bytes_held(self) -> int:
        return sum(self.blocks.values())

    def on_line(self, version: PolicyVersion) -> bool:
        return on_line(self.line, version.lineage, version.number)

    def is_ahead(self, version: PolicyVersion) -> bool:
        """Would a record that the broker has not followed yet put this version on the line?"""
        return version.lineage > self.lineage or (version.lineage == self.lineage and version.number > self.head)

    def group(self, group: str) -> Group:
        found = self.groups.get(group)
        if found is not None:
            return found
        ended = self.finished.get(group)
        if ended is not None:
            raise UnknownGroup(
                f"group {group} of run {self.run} was {ended.status} in step {ended.step}: its rows are freed",
            )
        raise UnknownGroup(f"group {group} was never offered to run {self.run}")

    def where(self, *statuses: Status) -> list[Group]:
        """Groups in these states that are not finished, oldest offer first."""
        found = [self.groups[g] for s in statuses for g in self.by_status[s]]
        return sorted(found, key=lambda g: g.order)

    def count(self, *statuses: Status) -> int:
        return sum(len(self.by_status[s]) + self.finished.count(s) for s in statuses)

    def status_of(self, group: str) -> Status | None:
        """Also of a finished group; None if it was never offered."""
        found = self.groups.get(group) or self.finished.get(group)
        return None if found is None else found.status

    def open_groups(self) -> list[Group]:
        """Leased and ready groups in order of deadline."""
        return sorted(self.where(Status.LEASED, Status.READY), key=lambda g: (g.deadline, g.order))

    def front(self) -> Group | None:
        """The pending group that is leased next."""
        return self.groups[self.waiting[0][1]] if self.waiting else None

    def places_taken(self) -> int:
        """Places of step `head` that are planned already; a closed step has none left."""
        if self.plan is None:
            return 0
        return self.spec.prompts_per_step if self.plan.close else len(self.plan.groups())

    def set_status(self, group: Group, status: Status) -> None:
        """Move a group between the indexes."""
        if group.status is Status.PENDING:
            entry = (group.order, group.id)
            at = bisect.bisect_left(self.waiting, entry)
            if at < len(self.waiting) and self.waiting[at] == entry:
                del self.waiting[at]
        self.by_status[group.status].pop(group.id, None)
        group.status = status
        self.by_status[status][group.id] = None
        if status is Status.PENDING:
            bisect.insort(self.waiting, (group.order, group.id))

    def finish(self) -> None:
        """Groups that ended in steps before F, in an ended run all of them, become entries of `finished`."""
        ended = self.phase is Phase.ENDED
        for status in (Status.TRAINED, Status.DROPPED, Status.RETURNED):
            for name in list(self.by_status[status]):
                group = self.groups[name]
                if ended or group.step < self.frontier:
                    self.free([group])
                    self.finished.add(group)
                    del self.groups[name], self.by_status[status][name]
        for step in [s for s in self.drops_by_step if s < self.frontier]:
            del self.drops_by_step[step]

    def free(self, groups: Iterable[Group]) -> None:
        """Forget rows, tokens and reservation of groups."""
        for group in groups:
            for part in group.parts:
                self.blocks.pop(part.block, None)
            group.parts.clear()
            group.rows, group.samples = NO_ROWS, NO_SAMPLES
            if group.reserved:
                group.reserved = False
                self.n_reserved -= 1
