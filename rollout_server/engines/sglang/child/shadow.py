"""The next version beside the live one: written by bytes, checked by hash, then loaded in buckets."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

BUCKET_BYTES = 256 << 20


class ShadowError(RuntimeError):
    """The version did not arrive as it was sent."""


@dataclass
class _Part:
    name: str
    tensor: Tensor
    view: memoryview
    hash: int


class Shadow:
    """One version at a time. Tensors lie in shared memory: the scheduler's processes load them without a copy."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._broken = ""

    def clear(self) -> None:
        self._parts, self._broken = [], ""

    def tensor(self, name: str, shape: list[int], dtype: str, digest: int, first: bool) -> None:
        """The bytes that follow belong to this tensor; the first of a version takes the place of all before."""
        if first:
            self.clear()
        made = torch.empty(math.prod(shape), dtype=getattr(torch, dtype)).share_memory_()
        view = memoryview(made.view(torch.uint8).numpy()) if made.numel() else memoryview(bytearray())
        self._parts.append(_Part(name, made.view(shape), view, digest))

    def write(self, offset: int, payload: bytes) -> None:
        part = self._parts[-1] if self._parts else None
        if part is None or offset + len(payload) > part.view.nbytes:
            self._broken = f"{len(payload)} bytes at {offset} belong to no tensor"
            return
        part.view[offset : offset + len(payload)] = payload

    def check(self) -> int:
        """One hash over names and hashes of all tensors; raises ShadowError where bytes are not what was sent."""
        if self._broken:
            raise ShadowError(self._broken)
        whole = xxhash.xxh3_64()
        for part in self._parts:
            found = xxhash.xxh3_64_intdigest(part.view)
            if found != part.hash:
                raise ShadowError(f"{part.name}: hash {found:016x} after the transfer, sent {part.hash:016x}")
            whole.update(f"{part.name}:{found:016x};".encode())
        return whole.intdigest()

    def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for part in self._parts:
            if bucket and size + part.view.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append((part.name, part.tensor))
            size += part.view.nbytes
        if bucket:
            yield bucket
