"""Calls that negotiate a transport and grant slabs of shared memory."""

import asyncio
import hmac
import os
from collections.abc import Callable

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import ArenaFull, InvalidInput, Precondition
from relax_common.rpc.calls import ServicerContext
from relax_queue.transport.shm.arena import Slab
from relax_queue.transport.shm.slabs import Session, Slabs


def key_to(slab: Slab) -> pb.SlabKey:
    return pb.SlabKey(offset=slab.offset, generation=slab.generation, size_bytes=slab.size)


class TransportCalls:
    """The part of relax.queue.v1.QueueService that negotiates how payload is transferred."""

    def __init__(self, slabs: Slabs) -> None:
        self._slabs = slabs
        self._processes = _Processes(slabs.end_process)
        self.unix_target = ""

    async def Hello(self, request: pb.HelloRequest, context: ServicerContext) -> pb.HelloResponse:
        response = pb.HelloResponse(unix_target=self.unix_target)
        if self._slabs.arena.open():
            response.arena_pid, response.arena_fd = os.getpid(), self._slabs.arena.fd
            response.arena_bytes = self._slabs.arena.limit_bytes
        return response

    async def Attach(self, request: pb.AttachRequest, context: ServicerContext) -> pb.AttachResponse:
        if not hmac.compare_digest(request.secret, self._slabs.arena.secret):
            raise Precondition("the secret is not that of this queue's arena: another queue, or another host")
        if not self._processes.watch(request.pid):
            raise Precondition(f"process {request.pid} is not known on this host")
        return pb.AttachResponse(session=self._slabs.begin(request.pid).id)

    async def Detach(self, request: pb.DetachRequest, context: ServicerContext) -> pb.DetachResponse:
        self._slabs.end(request.session)
        return pb.DetachResponse()

    async def GrantSlab(self, request: pb.GrantSlabRequest, context: ServicerContext) -> pb.GrantSlabResponse:
        session = self._slabs.session(request.session)
        self._slabs.drop(session, ((key.offset, key.generation) for key in request.unused))
        if not request.size_bytes:
            raise InvalidInput("GrantSlab: size_bytes is 0")
        grant = self._slab(session, request.size_bytes)
        if grant is None:
            arena = self._slabs.arena
            raise ArenaFull(
                f"the arena has no {request.size_bytes} bytes in one piece: {arena.used_bytes} of {arena.limit_bytes} "
                f"are in use",
            )
        return pb.GrantSlabResponse(grant=grant)

    def _slab(self, session: Session, n_bytes: int) -> pb.SlabGrant | None:
        granted = self._slabs.grant(session, n_bytes)
        return pb.SlabGrant(slab=key_to(granted[0]), write_seconds=granted[1]) if granted is not None else None


class _Processes:
    """Watches processes by descriptor, so that a reused process id is never mistaken for the original process."""

    def __init__(self, ended: Callable[[int], None]) -> None:
        self._ended = ended
        self._fds: dict[int, int] = {}

    def watch(self, pid: int) -> bool:
        """`ended(pid)` will be called once; returns False if there is no such process."""
        if pid in self._fds:
            return True
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return False
        self._fds[pid] = fd
        asyncio.get_running_loop().add_reader(fd, self._on_end, pid)
        return True

    def _on_end(self, pid: int) -> None:
        self._forget(pid)
        self._ended(pid)

    def _forget(self, pid: int) -> None:
        fd = self._fds.pop(pid)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)

    def close(self) -> None:
        for pid in list(self._fds):
            self._forget(pid)
