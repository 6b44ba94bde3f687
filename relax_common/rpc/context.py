"""What a servicer method may ask of the call that it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Protocol

import grpc


class ServicerContext(Protocol):
    """The part of `grpc.aio.ServicerContext` that Relax uses, so that servicers are typed and tests can stand in."""

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline; None without one."""
        ...

    def peer(self) -> str: ...

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]] | None: ...

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: object) -> NoReturn: ...
