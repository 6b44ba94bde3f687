"""Calls over the socket pair to the engine's process: numbered, answered in any order, failed together."""

import asyncio
import socket

from relax_common.json_types import JsonMapping, JsonObject
from rollout_server.engines.contract import EngineError, RequestRefused
from rollout_server.engines.sglang.backend import BackendLost
from rollout_server.engines.sglang.frames import Buffer, frame, read_frame

_STREAM_BYTES_MAX = 1 << 20


class Connection:
    """One per incarnation of the engine's process; never reused."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._answers: dict[int, asyncio.Future[tuple[JsonObject, bytes]]] = {}
        self._next = 0
        self._why_lost = ""

    @property
    def lost(self) -> bool:
        return bool(self._why_lost)

    @classmethod
    async def over(cls, ours: socket.socket) -> "Connection":
        return cls(*await asyncio.open_connection(sock=ours, limit=_STREAM_BYTES_MAX))

    async def hello(self) -> JsonObject:
        """The first frame, before any call."""
        header, _ = await read_frame(self._reader)
        return header

    async def read_for_ever(self) -> None:
        """Ends when the peer is gone; then every call fails."""
        try:
            while True:
                header, payload = await read_frame(self._reader)
                answer = self._answers.pop(header["id"], None)
                if answer is not None and not answer.done():
                    answer.set_result((header, payload))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.fail("its process has ended")

    def fail(self, why: str) -> None:
        self._why_lost = self._why_lost or why
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(BackendLost(f"the engine is lost: {self._why_lost}"))
        self._answers.clear()
        self._writer.close()

    async def call(self, header: JsonMapping, payload: Buffer = b"") -> tuple[JsonObject, bytes]:
        if self._why_lost:
            raise BackendLost(f"the engine is lost: {self._why_lost}")
        self._next += 1
        number = self._next
        answer = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            await self._send(frame({"id": number, **header}, payload))
            result, data = await answer
        finally:
            self._answers.pop(number, None)
        if "error" in result:
            raise (RequestRefused if result.get("refused") else EngineError)(result["error"])
        return result, data

    async def _send(self, buffers: tuple[bytes, Buffer]) -> None:
        try:
            self._writer.writelines(buffers)
            await self._writer.drain()
        except ConnectionError as error:
            raise BackendLost(f"the engine is lost: {self._why_lost or error}") from error
