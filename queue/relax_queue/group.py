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
    """State of one group; only `fold.apply` changes it.

    attempts: leases so far, the newest is the one that counts. leases_lost: those that ran out or whose server was
    replaced. oldest_trained: tokens of older versions are masked; 0 masks none.
    """

    id: str
    order: int
    prompt: Prompt
    status: Status = Status.PENDING
    attempts: int = 0
    leases_lost: int = 0
    server: str = ""
    term: int = 0
    confirmed: int = 0
    deadline: int = 0
    oldest_trained: int = 0
    reserved: bool = False
    parts: list[Part] = field(default_factory=list)
    rows: dict[SegmentKey, RowFacts] = field(default_factory=dict)
    samples: dict[int, SampleFacts] = field(default_factory=dict)
    step: int = -1
    reason: str = ""
    detail: str = ""

    def versions(self) -> set[PolicyVersion]:
        """Distinct policy versions of the tokens that would be trained."""
        found = map(PolicyVersion.unpack, {v for row in self.rows.values() for v in row.versions})
        return {v for v in found if v.number >= self.oldest_trained}

    def loss_tokens(self, row: RowFacts) -> int:
        """Tokens of a row with loss mask 1 after masking."""
        if not self.oldest_trained or all(PolicyVersion.unpack(v).number >= self.oldest_trained for v in row.versions):
            return row.n_loss_tokens
        counted = zip(row.versions, row.version_tokens, strict=True)
        return sum(n for v, n in counted if PolicyVersion.unpack(v).number >= self.oldest_trained)

    def has_tokens_to_train(self) -> bool:
        return any(self.loss_tokens(row) for row in self.trained_rows())

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
