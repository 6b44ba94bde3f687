"""One prompt group: its state and what it holds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from relax_common.versions import PackedVersion, PolicyVersion
from relax_queue.rows.facts import NO_ROWS, NO_SAMPLES, RowFacts, SampleFacts
from relax_queue.rows.row_keys import RowKeys
from relax_queue.rules.events import Prompt


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
    """A stored column block with fields of a group.

    Its row-scoped values follow the order of `rows`, its sample-scoped ones that of their samples.
    """

    block: int
    fields: tuple[str, ...]
    rows: RowKeys
    digest: str
    attempt: int

    def samples(self) -> Sequence[int]:
        """The samples, by first appearance."""
        return self.rows.sample_numbers()


_NEVER_LEASED = PackedVersion(0)


@dataclass(slots=True)
class Group:
    """State of one group; only `apply` changes it.

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
    confirmed: PackedVersion = _NEVER_LEASED
    deadline: int = 0
    oldest_trained: int = 0
    reserved: bool = False
    parts: list[Part] = field(default_factory=list)
    rows: RowFacts = NO_ROWS
    samples: SampleFacts = NO_SAMPLES
    step: int = -1
    reason: str = ""
    detail: str = ""

    def versions(self) -> set[PolicyVersion]:
        """Distinct policy versions of the tokens that would be trained."""
        found = map(PolicyVersion.unpack, self.rows.distinct_versions())
        return {v for v in found if v.number >= self.oldest_trained}

    def loss_tokens(self) -> list[int]:
        """For each of `trained_rows`, the number of tokens with loss mask 1 after masking."""
        return self.trained_rows().loss_tokens(self.oldest_trained)

    def has_tokens_to_train(self) -> bool:
        return any(self.loss_tokens())

    def oldest_version(self) -> int | None:
        """Number of the oldest such version."""
        return oldest(self.versions())

    def trained_rows(self) -> RowFacts:
        """Rows of valid samples, in order of sample and segment."""
        if self.samples.n_valid == len(self.samples):
            return self.rows
        return self.rows.of_samples(self.samples.valid_samples())


def oldest(versions: Iterable[PolicyVersion]) -> int | None:
    return min((v.number for v in versions), default=None)
