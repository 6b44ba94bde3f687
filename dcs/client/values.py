"""What a client of dcs gives and gets."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from dcs.rules.line import Ancestry
from relax.dcs.v1 import dcs_pb2
from relax_common.versions import PolicyVersion


@dataclass(frozen=True)
class SliceData:
    """A hyper-rectangle of a parameter with its bytes (C order)."""

    name: str
    full_shape: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]
    dtype: str
    """safetensors name, for example F32 or BF16."""
    data: bytes | memoryview

    def to_proto(self) -> dcs_pb2.Slice:
        size = self.data.nbytes if isinstance(self.data, memoryview) else len(self.data)
        return dcs_pb2.Slice(
            name=self.name,
            full_shape=self.full_shape,
            start=self.start,
            extent=self.extent,
            dtype=self.dtype,
            hash=xxhash.xxh3_64_intdigest(self.data),
            size_bytes=size,
        )


@dataclass(frozen=True)
class Head:
    """State of a run's log as GetHead gave it."""

    head: PolicyVersion | None
    lineage: int
    recovery: PolicyVersion
    recovery_in_memory: bool
    holds_head_bytes: bool
    record: dcs_pb2.CommitRecord
    revision: int
    line: Ancestry
    """Every version from 0 to the head, by number."""

    @staticmethod
    def from_message(message: dcs_pb2.GetHeadResponse) -> Head:
        head = PolicyVersion.from_proto(message.head) if message.has_head else None
        return Head(
            head=head,
            lineage=message.lineage,
            recovery=PolicyVersion.from_proto(message.recovery),
            recovery_in_memory=message.recovery_in_memory,
            holds_head_bytes=message.holds_head_bytes,
            record=message.head_record,
            revision=message.revision,
            line=Ancestry([PolicyVersion.from_proto(first) for first in message.line], head),
        )

    def next_version(self) -> PolicyVersion:
        return PolicyVersion(self.lineage, 0 if self.head is None else self.head.number + 1)
