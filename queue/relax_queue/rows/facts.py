"""What planning needs of rows and samples without their payload: a few packed columns instead of an object each."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import numpy.typing as npt

from relax_common.versions import NUMBER_MASK, PackedVersion
from relax_queue.rows import row_keys
from relax_queue.rows.row_keys import RowKeys

Index = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class RowFacts:
    """Rows of one group; little-endian columns with one value per row.

    n_tokens, n_loss_tokens: int32. Three columns of their own say which versions sampled the trained ones, in
    order of rows, then of versions: version_tokens[i] (int32) tokens of row version_rows[i] (int32) have versions[i]
    (int64, packed).
    """

    keys: RowKeys
    n_tokens: bytes
    n_loss_tokens: bytes
    version_rows: bytes = b""
    versions: bytes = b""
    version_tokens: bytes = b""

    def __len__(self) -> int:
        return len(self.n_tokens) // 4

    def distinct_versions(self) -> set[int]:
        """The packed versions of trained tokens."""
        return set(array("q", self.versions))

    def tokens(self) -> list[int]:
        return array("i", self.n_tokens).tolist()

    def loss_tokens(self, oldest_trained: int = 0) -> list[int]:
        """Tokens of each row with loss mask 1; those of versions before `oldest_trained` are masked."""
        counts = array("i", self.n_loss_tokens).tolist()
        if oldest_trained:
            columns = array("i", self.version_rows), array("q", self.versions), array("i", self.version_tokens)
            for row, version, tokens in zip(*columns, strict=True):
                if version & NUMBER_MASK < oldest_trained:
                    counts[row] -= tokens
        return counts

    def merged(self, other: RowFacts) -> RowFacts:
        """The rows of both, in order of sample and segment; they have no key in common."""
        if not len(self) and other.keys.ascending:
            return other
        pairs = zip(self.keys.columns(), other.keys.columns(), strict=True)
        samples, segments = (np.concatenate(pair) for pair in pairs)
        group = (self.keys.groups or other.keys.groups)[0]
        both = RowFacts(
            row_keys.keys_of_columns(group, samples, segments),
            self.n_tokens + other.n_tokens,
            self.n_loss_tokens + other.n_loss_tokens,
            self.version_rows + (np.frombuffer(other.version_rows, "<i4") + np.int32(len(self))).tobytes(),
            self.versions + other.versions,
            self.version_tokens + other.version_tokens,
        )
        return both.take(np.lexsort((segments, samples)))

    def of_samples(self, wanted: Collection[int]) -> RowFacts:
        samples, _ = self.keys.columns()
        return self.take(np.flatnonzero(np.isin(samples, list(wanted))))

    def without(self, samples: Collection[int]) -> RowFacts:
        own, _ = self.keys.columns()
        return self.take(np.flatnonzero(~np.isin(own, list(samples))))

    def take(self, rows: Index) -> RowFacts:
        """The rows named, in this order."""
        if len(rows) == len(self) and bool((rows[1:] > rows[:-1]).all()):
            return self
        if not len(rows):
            return NO_ROWS
        samples, segments = self.keys.columns()
        place = np.full(len(self), -1, np.int32)
        place[rows] = np.arange(len(rows), dtype=np.int32)
        version_rows = place[np.frombuffer(self.version_rows, "<i4")]
        entries = np.argsort(version_rows, kind="stable")
        entries = entries[version_rows[entries] >= 0]
        return RowFacts(
            row_keys.keys_of_columns(self.keys.groups[0], samples[rows], segments[rows]),
            np.frombuffer(self.n_tokens, "<i4")[rows].tobytes(),
            np.frombuffer(self.n_loss_tokens, "<i4")[rows].tobytes(),
            version_rows[entries].tobytes(),
            np.frombuffer(self.versions, "<i8")[entries].tobytes(),
            np.frombuffer(self.version_tokens, "<i4")[entries].tobytes(),
        )


NO_ROWS = RowFacts(row_keys.EMPTY, b"", b"")


def facts_of_rows(keys: RowKeys, n_tokens: Sequence[int], versions: Sequence[Mapping[PackedVersion, int]]) -> RowFacts:
    """From lists: the tokens of each row, and by packed version those with loss mask 1."""
    entries = [(row, version, n) for row, counts in enumerate(versions) for version, n in sorted(counts.items())]
    rows, packed, tokens = zip(*entries, strict=True) if entries else ((), (), ())
    return RowFacts(
        keys,
        np.array(n_tokens, "<i4").tobytes(),
        np.array([sum(counts.values()) for counts in versions], "<i4").tobytes(),
        np.array(rows, "<i4").tobytes(),
        np.array(packed, "<i8").tobytes(),
        np.array(tokens, "<i4").tobytes(),
    )


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """Complete samples; little-endian columns with one value per sample.

    samples: int32. valid: uint8, 1 for reward status 0. rewards: float64, known of valid ones; empty where rows have no
    reward.
    """

    samples: bytes
    valid: bytes
    rewards: bytes = b""

    def __len__(self) -> int:
        return len(self.valid)

    def __iter__(self) -> Iterator[int]:
        return iter(array("i", self.samples))

    @property
    def n_valid(self) -> int:
        return self.valid.count(1)

    def valid_samples(self) -> list[int]:
        return [sample for sample, valid in zip(self, self.valid, strict=True) if valid]

    def reward_mean(self) -> float | None:
        """Over valid samples."""
        if not self.rewards or not self.n_valid:
            return None
        return sum(compress(array("d", self.rewards), self.valid)) / self.n_valid

    def merged(self, other: SampleFacts) -> SampleFacts:
        """The samples of both, in order; for a sample in both, the facts of `other` count."""
        if not len(self):
            order_of_other = list(other)
            if order_of_other == sorted(set(order_of_other)):
                return other
        samples = np.frombuffer(self.samples + other.samples, "<i4")
        # From the end, so that the first of equals is the newest.
        _, found = np.unique(samples[::-1], return_index=True)
        order = len(samples) - 1 - found
        return SampleFacts(
            samples[order].tobytes(),
            np.frombuffer(self.valid + other.valid, np.uint8)[order].tobytes(),
            np.frombuffer(self.rewards + other.rewards, "<f8")[order].tobytes() if other.rewards else b"",
        )


NO_SAMPLES = SampleFacts(b"", b"")


def facts_of_samples(samples: Sequence[int], valid: Sequence[bool], rewards: Sequence[float] = ()) -> SampleFacts:
    """From lists; `rewards` of all samples, or of none."""
    return SampleFacts(np.array(samples, "<i4").tobytes(), bytes(valid), np.array(rewards, "<f8").tobytes())
