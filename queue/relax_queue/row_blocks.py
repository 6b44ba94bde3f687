"""Keys of many rows on the wire: one block of bytes instead of a message for each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import InvalidInput

RowKey = tuple[str, int, int]  # group, sample, segment


def block_to(rows: Sequence[RowKey]) -> pb.RowBlock:
    """As a message; the same for the same keys."""
    groups: dict[str, int] = {}
    triples = [(groups.setdefault(group, len(groups)), sample, segment) for group, sample, segment in rows]
    return pb.RowBlock(groups=groups, keys=np.array(triples, "<i4").tobytes())


def block_from(message: pb.RowBlock) -> tuple[RowKey, ...]:
    """Keys in order; raises InvalidInput for a block that is none."""
    groups = list(message.groups)
    if len(message.keys) % 12:
        raise InvalidInput(f"a block of row keys has {len(message.keys)} bytes, no whole number of int32 triples")
    triples = np.frombuffer(message.keys, "<i4").reshape(-1, 3)
    if triples.size and (triples.min() < 0 or triples[:, 0].max() >= len(groups)):
        raise InvalidInput(f"a block of row keys refers to groups outside the {len(groups)} it names")
    return tuple([(groups[g], sample, segment) for g, sample, segment in triples.tolist()])
