"""Policy versions as values, and their packed form in the `versions` column."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NewType

from relax.common.v1 import common_pb2

PackedVersion = NewType("PackedVersion", int)
"""A policy version as one number, lineage << 32 | number, as the `versions` column stores it per token."""

NOT_SAMPLED = PackedVersion(-1)
"""Packed version of a token that no policy sampled (prompt, padding, observation)."""

_NUMBER_BITS = 32
NUMBER_MASK = (1 << _NUMBER_BITS) - 1
"""The bits of a packed version that hold its number."""


@dataclass(frozen=True, order=True)
class PolicyVersion:
    """Weights after `number` committed steps on `lineage`; ordered by lineage first."""

    lineage: int
    number: int

    def pack(self) -> PackedVersion:
        return PackedVersion(self.lineage << _NUMBER_BITS | self.number)

    @staticmethod
    @lru_cache(maxsize=1024)
    def unpack(packed: PackedVersion) -> PolicyVersion:
        if packed < 0:
            raise ValueError(f"packed version {packed} belongs to a token that was not sampled")
        return PolicyVersion(packed >> _NUMBER_BITS, packed & NUMBER_MASK)

    @staticmethod
    def from_proto(message: common_pb2.PolicyVersion) -> PolicyVersion:
        return PolicyVersion(message.lineage, message.number)

    def to_proto(self) -> common_pb2.PolicyVersion:
        return common_pb2.PolicyVersion(lineage=self.lineage, number=self.number)

    def __str__(self) -> str:
        return f"{self.lineage}.{self.number}"
