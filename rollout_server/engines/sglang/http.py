"""JSON over HTTP/1.1 on the event loop: one connection per call, every status checked, transient failures repeated."""

import asyncio
import itertools
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from relax_common.json_types import JsonMapping, JsonValue
from relax_common.process.telemetry import get_logger
from relax_common.rpc.channels import Backoff
from rollout_server.engines.contract import EngineError, RequestRefused
from rollout_server.engines.sglang.backend import BackendLost

Body = JsonMapping | Callable[[int], JsonMapping] | None

TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
"""A proxy's or a starting server's answer: the same call may succeed in a moment."""


@dataclass(frozen=True)
class HttpClient:
    """For calls that are idempotent, or made idempotent by a new id for each try."""

    url: str

    async def call(self, method: str, path: str, body: Body = None, *, deadline_seconds: float) -> JsonValue:
        """The JSON answer of the first try that succeeds. A body that differs from try to try is made by a function.

        Raises BackendLost when there was none within the deadline, RequestRefused for 400 and 422, else EngineError.
        """
        end, backoff, failure = time.monotonic() + deadline_seconds, Backoff(), ""
        for attempt in itertools.count():
            try:
                async with asyncio.timeout(max(0.1, end - time.monotonic())):
                    status, payload = await self._once(method, path, body(attempt) if callable(body) else body)
                failure = f"HTTP {status}: {_first_line(payload)}"
            except TimeoutError:
                # If the deadline cut a try short, the error of the try before it says more.
                status, payload, failure = 0, b"", failure or "no answer"
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                status, payload, failure = 0, b"", str(error) or type(error).__name__
            if 200 <= status < 300:
                return json.loads(payload) if payload.strip() else None
            if status in (400, 422):
                raise RequestRefused(f"{self.url}{path}: {failure}")
            if status and status not in TRANSIENT:
                raise EngineError(f"{self.url}{path}: {failure}")
            if time.monotonic() >= end:
                raise BackendLost(f"{self.url}{path} has not answered for {deadline_seconds:.0f} s: {failure}")
            get_logger().debug("engine_call_repeated", path=path, error=failure)
            await asyncio.sleep(min(backoff.next_seconds(), max(0.0, end - time.monotonic())))

    async def _once(self, method: str, path: str, body: JsonMapping | None) -> tuple[int, bytes]:
        parts = urlsplit(self.url)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=secure)
        try:
            content = b"" if body is None else json.dumps(body).encode()
            writer.write(
                f"{method} {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
                + content
            )
            await writer.drain()
            return await _answer(reader)
        finally:
            writer.close()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    words = (await reader.readuntil(b"\r\n")).split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise ValueError("the answer is not HTTP/1.1")
    headers: dict[bytes, bytes] = {}
    while (line := (await reader.readuntil(b"\r\n")).strip()) != b"":
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    return int(words[1]), await _body(reader, headers)


async def _body(reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> bytes:
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        pieces = []
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            pieces.append(await reader.readexactly(size))
            await reader.readexactly(2)
        return b"".join(pieces)
    if b"content-length" in headers:
        return await reader.readexactly(int(headers[b"content-length"]))
    return await reader.read()


def _first_line(payload: bytes) -> str:
    return payload.decode(errors="replace").strip().splitlines()[0][:300] if payload.strip() else "no text"
