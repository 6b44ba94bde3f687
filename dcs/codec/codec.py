"""The contract of a codec, and the codec that sends a version as all of its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dcs.rules.manifest import check_complete
from relax.dcs.v1 import dcs_pb2
from relax_common.tensors import Buffer, WholeTensor, assemble

Pulled = Sequence[tuple[dcs_pb2.Slice, Buffer]]
"""Entries of a manifest with their bytes, as received."""

Schema = dict[str, tuple[int, ...]]
"""Full shape by parameter name."""


class Codec(Protocol):
    """Pure functions over the slices of one version."""

    @property
    def name(self) -> str: ...

    def check(self, entries: Sequence[dcs_pb2.Slice], schema: Schema | None) -> None:
        """Called at dcs before a commit. Raises Precondition if the slices are not a whole version with the parameters
        of `schema` (those of version 0)."""

    def decode(self, pulled: Pulled) -> dict[str, WholeTensor]:
        """Called at the receiver, where the bytes are consumed. Raises DataLoss if they do not match the manifest."""


class _Full:
    """Each parameter is covered by slices exactly once."""

    name = "full"

    def check(self, entries: Sequence[dcs_pb2.Slice], schema: Schema | None) -> None:
        check_complete(entries, schema)

    def decode(self, pulled: Pulled) -> dict[str, WholeTensor]:
        return assemble(pulled)


FULL: Codec = _Full()
