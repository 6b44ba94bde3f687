"""Rank 0 leads: it passes its decisions, and the answers of other daemons, on to all ranks, including errors.

Messages are bytes over a gloo group. Every collective has the group's timeout; a lost rank makes it raise, so
that all ranks end.
"""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from relax_common import errors
from relax_common.errors import DeadlineExceeded, RelaxError
from relax_common.process.telemetry import get_logger

T = TypeVar("T")

_FINE, _FAILED = b"\0", b"\1"
PATIENCE_SECONDS = 600.0


class LostRank(RuntimeError):
    """A collective failed: another rank has ended or is silent."""


class RankGroup:
    def __init__(self, rank: int, world_size: int, timeout_seconds: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    def share(self, make: Callable[[], bytes]) -> bytes:
        """Run `make` on rank 0. Every rank gets the bytes it returned, or raises the RelaxError that it raised."""
        if self.world_size == 1:
            return make()
        return _opened(self._broadcast(_attempted(make) if self.rank == 0 else b"", source=0))

    def agree(self, call: Callable[[], T]) -> T:
        """Run `call` on every rank. If it raises a RelaxError on any rank, all ranks raise the error of the lowest such
        rank."""
        if self.world_size == 1:
            return call()
        result: list[T] = []

        def run() -> bytes:
            result.append(call())
            return b""

        frame = _attempted(run)
        failed_rank = torch.tensor([self.world_size if frame.startswith(_FINE) else self.rank])
        self._collective(lambda: dist.all_reduce(failed_rank, op=dist.ReduceOp.MIN, group=self._group))
        source = int(failed_rank.item())
        if source < self.world_size:
            _opened(self._broadcast(frame, source))
        return result[0]

    def total(self, value: float) -> float:
        """Sum over all ranks."""
        summed = torch.tensor([value], dtype=torch.float64)
        if self.world_size > 1:
            self._collective(lambda: dist.all_reduce(summed, group=self._group))
        return float(summed.item())

    def patiently(self, share: Callable[[], T], what: str) -> T:
        """Run a shared, idempotent call; repeat it while its peer is away for longer than one call waits."""
        waited = 0.0
        while True:
            try:
                return share()
            except DeadlineExceeded as error:
                waited += 60.0
                if waited >= PATIENCE_SECONDS:
                    raise
                get_logger().warning("peer_away", what=what, error=error.message)

    def _broadcast(self, frame: bytes, source: int) -> bytes:
        size = torch.tensor([len(frame)])
        self._collective(lambda: dist.broadcast(size, src=source, group=self._group))
        data = torch.empty(int(size.item()), dtype=torch.uint8)
        if self.rank == source:
            data.copy_(torch.frombuffer(bytearray(frame), dtype=torch.uint8))
        self._collective(lambda: dist.broadcast(data, src=source, group=self._group))
        return data.numpy().tobytes()

    def _collective(self, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:
            raise LostRank(f"rank {self.rank}: another rank of the role is lost: {error}") from error


def _attempted(call: Callable[[], bytes]) -> bytes:
    try:
        return _FINE + call()
    except RelaxError as error:
        told = {"kind": type(error).__name__, "message": error.message, "reason": error.reason}
        return _FAILED + json.dumps(told).encode()


def _opened(frame: bytes) -> bytes:
    if frame.startswith(_FINE):
        return frame[1:]
    told = json.loads(frame[1:])
    kind: type[RelaxError] = getattr(errors, told["kind"])
    raise kind(told["message"], reason=told["reason"])
