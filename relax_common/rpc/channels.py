"""The one way to reach a daemon: channels with keepalive and a default deadline, and the one retry policy."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio

from relax_common.errors import DeadlineExceeded, RelaxError, Unavailable, from_rpc
from relax_common.process.telemetry import get_logger
from relax_common.rpc.token import call_metadata

T = TypeVar("T")

CHUNK_BYTES = 2 << 20
"""Largest bytes frame of a stream: half of what a client with default settings accepts. From 1 to 2 MiB the CPU time
per byte falls by some 7 %; larger frames gain nothing."""

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
    # Frames of a megabyte come in fewer pieces: some 15 % less CPU per byte.
    ("grpc.http2.lookahead_bytes", 8 << 20),
    # Two channels of one process to one address must not share a broken connection's back-off.
    ("grpc.use_local_subchannel_pool", 1),
)


Method: TypeAlias = Any
"""A method of a channel: Any, because gRPC types each kind of method differently."""
Answer: TypeAlias = Any
AnyChannel: TypeAlias = Any
"""grpc.Channel or grpc.aio.Channel."""


class _Call:
    """A method of a daemon as callers see it: every call carries the token and has a deadline."""

    def __init__(self, method: Method, timeout_seconds: float | None) -> None:
        self._method = method
        self._metadata = call_metadata()
        self._timeout_seconds = timeout_seconds

    def __call__(self, request: object, timeout: float | None = None, **options: object) -> Answer:
        # 0.0 is a deadline that has passed, not a call without one.
        seconds = self._timeout_seconds if timeout is None else timeout
        return self._method(request, timeout=seconds, metadata=self._metadata, **options)

    def future(self, request: object, timeout: float | None = None, **options: object) -> Answer:
        seconds = self._timeout_seconds if timeout is None else timeout
        return self._method.future(request, timeout=seconds, metadata=self._metadata, **options)


class _Calls:
    """The methods of a channel; `timeout_seconds` is for calls that name no deadline."""

    def __init__(self, channel: AnyChannel, timeout_seconds: float | None) -> None:
        self._channel = channel
        self._timeout_seconds = timeout_seconds

    def unary_unary(self, *method: Method, **options: Method) -> Method:
        return _Call(self._channel.unary_unary(*method, **options), self._timeout_seconds)

    def unary_stream(self, *method: Method, **options: Method) -> Method:
        return _Call(self._channel.unary_stream(*method, **options), self._timeout_seconds)

    def stream_unary(self, *method: Method, **options: Method) -> Method:
        return _Call(self._channel.stream_unary(*method, **options), self._timeout_seconds)

    def stream_stream(self, *method: Method, **options: Method) -> Method:
        return _Call(self._channel.stream_stream(*method, **options), self._timeout_seconds)


class SyncChannel(_Calls, grpc.Channel):
    """A channel for threads."""

    def subscribe(self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool = False) -> None:
        self._channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> SyncChannel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AioChannel(_Calls, grpc.aio.Channel):
    """A channel for an event loop."""

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        state: grpc.ChannelConnectivity = self._channel.get_state(try_to_connect)
        return state

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> AioChannel:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def sync_channel(address: str) -> grpc.Channel:
    """Channel for threads (trainer ranks, command line). A call that names no deadline gets the default one."""
    return SyncChannel(grpc.insecure_channel(address, options=CHANNEL_OPTIONS), DEFAULT_DEADLINE_SECONDS)


def aio_channel(address: str) -> grpc.aio.Channel:
    """Channel for code on an event loop (daemons among each other); callers set deadlines per call."""
    return AioChannel(grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS), None)


class Backoff:
    """Delays of 50 ms growing to 1 s with jitter."""

    def __init__(self) -> None:
        self._next_seconds = 0.05

    def next_seconds(self) -> float:
        delay = self._next_seconds * random.uniform(0.7, 1.3)
        self._next_seconds = min(1.0, self._next_seconds * 1.6)
        return delay


def call_with_retry(
    call: Callable[[float], T], *, what: str, deadline_seconds: float, on_wait: Callable[[str], None] = lambda _: None
) -> T:
    """Repeat an idempotent call while the peer is UNAVAILABLE; `on_wait` is told why before each repeat.

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
            on_wait(error.message)
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
