"""The next version, next to the live one: copied from the rollout server's memory, checked, loaded in buckets."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from relax_common.storage.sealed_memory import Place, open_sealed

BUCKET_BYTES = 256 << 20


class ShadowError(RuntimeError):
    """The version is not what was sent."""


class Shadow:
    """Tensors in memory that the scheduler's processes map; the next version is written over them."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def take(self, place: Place, entries: Sequence[Sequence[Any]]) -> None:
        """`entries`: name, element type, shape and hash of the tensors, which are there one after another.

        Raises ShadowError if bytes are not what was sent, OSError if the memory cannot be mapped.
        """
        memory = open_sealed(place)
        before, self._tensors = self._tensors, {}
        offset = 0
        for name, dtype, shape, digest in entries:
            tensor = _room(before.get(name), getattr(torch, dtype), shape)
            target = tensor.view(-1).view(torch.uint8).numpy()
            target[:] = np.frombuffer(memory.view, np.uint8, target.nbytes, offset)
            offset += target.nbytes
            found = xxhash.xxh3_64_intdigest(target.data)
            if found != digest:
                raise ShadowError(f"{name}: hash {found:016x} after the transfer, sent {digest:016x}")
            self._tensors[name] = tensor

    def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in self._tensors.items():
            if bucket and size + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.nbytes
        if bucket:
            yield bucket


def _room(known: Tensor | None, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """Touch the pages now: fresh pages cost several times as much as the copy into them."""
    if known is not None and known.dtype == dtype and list(known.shape) == shape:
        return known
    room: Tensor = torch.empty(math.prod(shape), dtype=dtype).share_memory_()
    return room.view(shape)
