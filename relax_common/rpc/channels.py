"""The one way to reach a daemon: channels with keepalive and a default deadline, and the one retry policy."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from relax_common.errors import DeadlineExceeded, RelaxError, Unavailable, from_rpc
from relax_common.process.logs import get_logger

T = TypeVar("T")

CHUNK_BYTES = 2 << 20
"""Largest bytes frame of a stream: half of what a client with default settings takes. From 1 to 2 MiB the CPU time a
byte falls by some 7 %, beyond it does not."""

DEFAULT_DEADLINE_SECONDS = 30.0

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted daemon must be found again quickly: the default back-off grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Also how long one attempt to connect may take: a busy host needs longer than the first delay.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # Frames of a megabyte come in fewer pieces: some 15 % less CPU a byte.
    ("grpc.http2.lookahead_bytes", 8 << 20),
    # Two channels of one process to one address must not share a broken connection's back-off.
    ("grpc.use_local_subchannel_pool", 1),
)


class _DefaultDeadline(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
):
    """No call without a deadline; streams that live long name theirs themselves."""

    def _with(self, details: Any) -> Any:
        if details.timeout is not None:
            return details
        return _Details(details.method, DEFAULT_DEADLINE_SECONDS, details)

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with(client_call_details), request)

    def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return continuation(self._with(client_call_details), request_iterator)


class _Details(grpc.ClientCallDetails):
    def __init__(self, method: str, timeout: float, base: Any) -> None:
        self.method = method
        self.timeout = timeout
        self.metadata = base.metadata
        self.credentials = base.credentials
        self.wait_for_ready = base.wait_for_ready
        self.compression = base.compression


def sync_channel(address: str) -> grpc.Channel:
    """Channel for threads (trainer ranks, rollout server, command line)."""
    return grpc.intercept_channel(plain_channel(address), _DefaultDeadline())


def plain_channel(address: str) -> grpc.Channel:
    """The same for callers that set a deadline for every call: without an interceptor a call costs a sixth less."""
    return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)


def aio_channel(address: str) -> grpc.aio.Channel:
    """Channel for code on an event loop (daemons among each other); callers set deadlines per call."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


class Backoff:
    """Delays of 50 ms growing to 1 s with jitter."""

    def __init__(self) -> None:
        self._next_seconds = 0.05

    def next_seconds(self) -> float:
        delay = self._next_seconds * random.uniform(0.7, 1.3)
        self._next_seconds = min(1.0, self._next_seconds * 1.6)
        return delay


def call_with_retry(call: Callable[[float], T], *, what: str, deadline_seconds: float) -> T:
    """Repeat an idempotent call while the peer is UNAVAILABLE.

    `call` gets the seconds left and must carry a key that makes a repeat harmless. Raises the peer's typed error, or
    DeadlineExceeded naming `what`.
    """
    end = time.monotonic() + deadline_seconds
    backoff = Backoff()
    while True:
        try:
            return call(max(0.1, end - time.monotonic()))
        except grpc.RpcError as rpc_error:
            error = from_rpc(rpc_error)
            _check_retriable(error, end, what, deadline_seconds)
        time.sleep(backoff.next_seconds())


async def acall_with_retry(call: Callable[[float], Awaitable[T]], *, what: str, deadline_seconds: float) -> T:
    """The same on an event loop."""
    end = time.monotonic() + deadline_seconds
    backoff = Backoff()
    while True:
        try:
            return await call(max(0.1, end - time.monotonic()))
        except grpc.RpcError as rpc_error:
            error = from_rpc(rpc_error)
            _check_retriable(error, end, what, deadline_seconds)
        await asyncio.sleep(backoff.next_seconds())


def _check_retriable(error: RelaxError, end: float, what: str, deadline_seconds: float) -> None:
    if not isinstance(error, Unavailable):
        raise error
    if time.monotonic() >= end:
        raise DeadlineExceeded(f"waited {deadline_seconds:.0f} s for {what}: {error.message}") from error
    get_logger().debug("call_retried", what=what, error=error.message)
