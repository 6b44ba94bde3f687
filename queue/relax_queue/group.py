"""One prompt group: where it stands and what it holds."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from relax_common.versions import PolicyVersion
from relax_queue.events import Prompt, RowFacts, SampleFacts, SegmentKey


class Status(StrEnum):
    """
    pending -> leased -> ready -> planned -> trained; leased, ready and planned may go back.
    pending, leased, ready, planned -> dropped (reason) or, when the run ends, returned.
    trained, dropped -> rolled_back -> pending after a rollback; any -> trained where a commit says so.
    """

    PENDING = "pending"
    LEASED = "leased"
    READY = "ready"
    PLANNED = "planned"
    TRAINED = "trained"
    DROPPED = "dropped"
    RETURNED = "returned"
    ROLLED_BACK = "rolled_back"


@dataclass(slots=True)
class Part:
    """An extent with fields of this group: its units of scope row follow `rows`, those of scope sample `samples`."""

    extent: int
    fields: tuple[str, ...]
    rows: tuple[SegmentKey, ...]
    samples: tuple[int, ...]
    digest: str
    attempt: int


@dataclass(slots=True)
class Group:
    """State of one group; only `run_state.apply` changes it."""

    id: str
    order: int
    prompt: Prompt
    status: Status = Status.PENDING
    attempts: int = 0
    server: str = ""
    term: int = 0
    confirmed: int = 0
    deadline: int = 0
    reserved: bool = False
    parts: list[Part] = field(default_factory=list)
    rows: dict[SegmentKey, RowFacts] = field(default_factory=dict)
    samples: dict[int, SampleFacts] = field(default_factory=dict)
    step: int = -1
    reason: str = ""

    def versions(self) -> set[PolicyVersion]:
        """Distinct policy versions of the tokens that would be trained."""
        return {PolicyVersion.unpack(v) for row in self.rows.values() for v in row.versions}

    def oldest_version(self) -> int | None:
        """Number of the oldest such version."""
        return oldest(self.versions())

    def n_valid_samples(self) -> int:
        return sum(s.valid for s in self.samples.values())

    def reward_mean(self) -> float | None:
        """Mean reward of valid samples."""
        rewards = [s.reward for s in self.samples.values() if s.valid and s.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    def trained_rows(self) -> list[RowFacts]:
        """Rows of valid samples, in order of sample and segment."""
        return [row for key, row in sorted(self.rows.items()) if key[0] in self.samples and self.samples[key[0]].valid]


def oldest(versions: Iterable[PolicyVersion]) -> int | None:
    return min((v.number for v in versions), default=None)
