"""Keys of many rows as spans: samples that follow each other are one span, in memory, in the log and on the wire."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import overload

import numpy as np
import numpy.typing as npt

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import InvalidInput
from relax_common.rows import RowKey

SegmentKey = tuple[int, int]  # sample, segment
KeySpan = tuple[int, int, int]
"""First sample, segment, number of consecutive samples"""
Ints = npt.NDArray[np.int32]

_SPAN = struct.Struct("<4i")
BLOCK_ROWS_MAX = 1 << 20
"""The most rows in one message, because a span of a few bytes could claim any number of them."""


@dataclass(frozen=True, slots=True, eq=False)
class RowKeys(Sequence[RowKey]):
    """Keys in order. The functions of this module make the same spans for the same keys.

    groups: by first appearance. spans: little-endian int32 quadruples: index into groups, first sample, segment, number
    of samples that follow each other. A group whose samples have one segment each is one span.
    """

    groups: tuple[str, ...]
    spans: bytes

    def __len__(self) -> int:
        return sum([span[3] for span in _SPAN.iter_unpack(self.spans)])

    def __iter__(self) -> Iterator[RowKey]:
        for group, first, segment, count in _SPAN.iter_unpack(self.spans):
            name = self.groups[group]
            for sample in range(first, first + count):
                yield RowKey(name, sample, segment)

    @overload
    def __getitem__(self, index: int) -> RowKey: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[RowKey, ...]: ...

    def __getitem__(self, index: int | slice) -> RowKey | tuple[RowKey, ...]:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RowKeys):
            return (self.groups, self.spans) == (other.groups, other.spans)
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return hash((self.groups, self.spans))

    def __add__(self, other: RowKeys) -> RowKeys:
        return join_keys([self, other])

    def by_group(self) -> Iterator[tuple[str, list[KeySpan]]]:
        """The spans, group by group; a group occurs again if the order returns to it."""
        for group, spans in groupby(_SPAN.iter_unpack(self.spans), itemgetter(0)):
            yield self.groups[group], [span[1:] for span in spans]

    def segments(self) -> Iterator[SegmentKey]:
        for _, first, segment, count in _SPAN.iter_unpack(self.spans):
            for sample in range(first, first + count):
                yield sample, segment

    def first_missing(self, spans: Iterable[KeySpan]) -> SegmentKey | None:
        """The first sample and segment of `spans` that is not among these keys of one group."""
        known: set[SegmentKey] | None = None
        own = list(_SPAN.iter_unpack(self.spans))
        for first, segment, count in spans:
            if len(own) == 1 and own[0][2] == segment and 0 <= first - own[0][1] <= own[0][3] - count:
                continue
            known = set(self.segments()) if known is None else known
            for sample in range(first, first + count):
                if (sample, segment) not in known:
                    return sample, segment
        return None

    def columns(self) -> tuple[Ints, Ints]:
        """Sample and segment of each row."""
        if self.is_one_span:
            _, start, of_all, n = _SPAN.unpack(self.spans)
            return np.arange(start, start + n, dtype=np.int32), np.full(n, of_all, np.int32)
        _, first, segment, count = np.frombuffer(self.spans, "<i4").reshape(-1, 4).T
        ends = np.cumsum(count)
        samples = np.repeat(first - (ends - count), count) + np.arange(ends[-1] if len(ends) else 0, dtype=np.int32)
        return samples.astype(np.int32), np.repeat(segment, count)

    @property
    def is_one_span(self) -> bool:
        """True only if this is one group with one row per sample."""
        return len(self.spans) == _SPAN.size

    @property
    def ascending(self) -> bool:
        """Are the keys of one group in order of sample and segment, each once?"""
        if self.is_one_span or not self.spans:
            return True
        samples, segments = self.columns()
        order = samples.astype(np.int64) << 32 | segments
        return bool((order[1:] > order[:-1]).all())

    def sample_numbers(self) -> Sequence[int]:
        """The samples of one group by first appearance."""
        if self.is_one_span:
            _, first, _, count = _SPAN.unpack(self.spans)
            return range(first, first + count)
        return list(dict.fromkeys([sample for sample, _ in self.segments()]))

    def samples(self) -> RowKeys:
        """Keys (group, sample, 0) of the samples by first appearance."""
        if self.is_one_span:
            group, first, _, count = _SPAN.unpack(self.spans)
            return RowKeys(self.groups, _SPAN.pack(group, first, 0, count))
        return keys_of(dict.fromkeys([(group, sample, 0) for group, sample, _ in self]))


def keys_of(rows: Iterable[tuple[str, int, int]]) -> RowKeys:
    """From keys in order."""
    if isinstance(rows, RowKeys):
        return rows
    groups: dict[str, int] = {}
    spans: list[int] = []
    known, group, end, segment = "", -1, -1, -1
    for name, sample, of_sample in rows:
        if sample == end and of_sample == segment and name == known:
            spans[-1] += 1
        else:
            if name != known or group < 0:
                known, group = name, groups.setdefault(name, len(groups))
            segment = of_sample
            spans += (group, sample, segment, 1)
        end = sample + 1
    return RowKeys(tuple(groups), _packed(spans))


def keys_of_samples(group: str, samples: Sequence[int], segment: int = 0) -> RowKeys:
    """Keys of a group's samples with the same segment."""
    if isinstance(samples, range) and samples.step == 1 and samples:
        return RowKeys((group,), _SPAN.pack(0, samples.start, segment, len(samples)))
    return keys_of([(group, sample, segment) for sample in samples])


def keys_of_columns(group: str, samples: Ints, segments: Ints) -> RowKeys:
    """Keys of one group from the sample and segment of each row."""
    if not len(samples):
        return EMPTY
    breaks = (np.diff(samples) != 1) | (np.diff(segments) != 0)
    begins = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    spans = np.zeros((len(begins), 4), "<i4")
    spans[:, 1], spans[:, 2] = samples[begins], segments[begins]
    spans[:, 3] = np.diff(begins, append=len(samples))
    return RowKeys((group,), spans.tobytes())


def join_keys(parts: Iterable[RowKeys]) -> RowKeys:
    """Keys one after another."""
    parts = [part for part in parts if part.spans]
    if len(parts) == 1:
        return parts[0]
    groups: dict[str, int] = {}
    spans: list[int] = []
    for part in parts:
        index = [groups.setdefault(name, len(groups)) for name in part.groups]
        for group, first, segment, count in _SPAN.iter_unpack(part.spans):
            if spans and (spans[-4], spans[-3] + spans[-1], spans[-2]) == (index[group], first, segment):
                spans[-1] += count
            else:
                spans += (index[group], first, segment, count)
    return RowKeys(tuple(groups), _packed(spans))


def _packed(spans: list[int]) -> bytes:
    return struct.pack(f"<{len(spans)}i", *spans)


EMPTY = RowKeys((), b"")


def block_to(rows: Iterable[tuple[str, int, int]]) -> pb.RowBlock:
    """The keys as a message; equal keys give equal messages."""
    keys = keys_of(rows)
    return pb.RowBlock(groups=keys.groups, spans=keys.spans)


def block_from(message: pb.RowBlock) -> RowKeys:
    """The keys of a message; raises InvalidInput if it is not valid."""
    groups, packed = tuple(message.groups), message.spans
    if len(packed) % _SPAN.size:
        raise InvalidInput(f"a block of row keys has {len(packed)} bytes, not a whole number of int32 quadruples")
    named = 0
    for group, first, segment, count in _SPAN.iter_unpack(packed):
        named += group == named
        if not 0 <= group < min(named, len(groups)):
            raise InvalidInput(f"a block of row keys must list its {len(groups)} groups in order of first appearance")
        if first < 0 or segment < 0 or count < 1 or first + count > 1 << 31:
            raise InvalidInput(f"a block of row keys has a span of {count} samples from {first}, segment {segment}")
    keys = RowKeys(groups[:named], packed)
    if len(keys) > BLOCK_ROWS_MAX:
        raise InvalidInput(f"a block of row keys names {len(keys)} rows, at most {BLOCK_ROWS_MAX} may be named")
    return keys
