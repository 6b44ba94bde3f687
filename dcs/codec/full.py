"""A version as all of its parameters, each covered by slices exactly once."""

from __future__ import annotations

from collections.abc import Sequence

from dcs.codec.base import Codec, Pulled, Schema
from dcs.rules.manifest import check_complete
from relax.dcs.v1 import dcs_pb2
from relax_common.tensors import WholeTensor, assemble


class _Full:
    name = "full"

    def check(self, entries: Sequence[dcs_pb2.Slice], schema: Schema | None) -> None:
        check_complete(entries, schema)

    def decode(self, pulled: Pulled) -> dict[str, WholeTensor]:
        return assemble(pulled)


FULL: Codec = _Full()
