"""Runs a daemon: gRPC server with health, reflection and channelz, metrics endpoint, readiness, SIGTERM drain."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, TypeAlias

import grpc
import grpc.aio
import uvloop
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from relax_common.errors import DeadlineExceeded, InvalidInput, RelaxError, StaleTerm, Unauthenticated, abort
from relax_common.process.config import EXIT_BAD_CONFIG, DaemonConfig
from relax_common.process.telemetry import LOOP_LAG_SECONDS, configure_logging, get_logger, start_metrics_server
from relax_common.process.tuning import collect_seldom, keep_freed_pages
from relax_common.rpc.calls import ServicerContext
from relax_common.rpc.token import HEADER, VARIABLE, bearer, is_bearer

EXIT_FAILED = 1
EXIT_PORT_IN_USE = 3
EXIT_STALE_TERM = 4
DRAIN_SECONDS = 75.0
DESCRIPTORS = 1 << 16
"""The soft limit to set, as far as the hard limit allows."""
_LAG_PROBE_SECONDS = 0.25
OPEN_TO_ALL = "/grpc.health.v1.Health/"

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # Frames of a megabyte come in fewer pieces: some 15 % less CPU per byte.
    ("grpc.http2.lookahead_bytes", 8 << 20),
)


class Daemon(Protocol):
    """What each daemon implements. `run` works until it is cancelled (drain) or returns an exit code."""

    service_names: tuple[str, ...]

    def add_to(self, server: grpc.aio.Server) -> None: ...

    async def run(self, address: str, metrics_address: str) -> int: ...

    async def drain(self) -> None: ...


Handler: TypeAlias = Any
"""grpc.RpcMethodHandler of any of the four kinds, or None for a method that nobody serves."""
Behavior: TypeAlias = Callable[..., Any]


class Door(grpc.aio.ServerInterceptor):
    """Admits only calls with the token (the health check is open to everybody), and turns a RelaxError raised by any
    method of a daemon into google.rpc.Status."""

    def __init__(self) -> None:
        self._expected = bearer()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(OPEN_TO_ALL):
            return handler
        shown = dict(handler_call_details.invocation_metadata or ()).get(HEADER)
        if not is_bearer(shown, self._expected):
            return _with_behavior(handler, _refuse, _refuse_stream)
        if not handler_call_details.method.startswith("/relax."):
            return handler
        behavior = handler.stream_unary or handler.unary_unary
        if behavior is not None:
            return _with_behavior(handler, _wrap_unary(behavior), None)
        return _with_behavior(handler, None, _wrap_stream(handler.stream_stream or handler.unary_stream))


def _with_behavior(handler: Handler, unary: Behavior | None, stream: Behavior | None) -> Handler:
    """The same kind of method with another behavior: `unary` or `stream`, depending on its kind of answer."""
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make: Behavior = kinds[handler.request_streaming, handler.response_streaming]
    behavior = stream if handler.response_streaming else unary
    return make(behavior, handler.request_deserializer, handler.response_serializer)


async def _refuse(request: object, context: ServicerContext) -> None:
    message = (
        "this daemon answers only calls that carry its token: send the metadata 'authorization: Bearer TOKEN' with the "
        f"content of the daemon's token file (see {VARIABLE})"
    )
    await abort(context, Unauthenticated(message))


async def _refuse_stream(request: object, context: ServicerContext) -> AsyncIterator[None]:
    await _refuse(request, context)
    yield


def _wrap_unary(behavior: Behavior) -> Behavior:
    async def call(request: object, context: ServicerContext) -> object:
        try:
            return await behavior(request, context)
        except RelaxError as error:
            await abort(context, error)

    return call


def _wrap_stream(behavior: Behavior) -> Behavior:
    async def call(request: object, context: ServicerContext) -> AsyncIterator[object]:
        try:
            async for response in behavior(request, context):
                yield response
        except RelaxError as error:
            await abort(context, error)

    return call


def run_daemon(config: DaemonConfig, service: str, make: Callable[[], Daemon]) -> int:
    """Serve until SIGTERM or until the daemon's own work ends; returns the exit code."""
    configure_logging(config.log_level, service, config.instance or service)
    keep_freed_pages()
    allow_descriptors()
    if os.environ.get("RELAX_EVENT_LOOP") == "asyncio":
        return asyncio.run(_serve(config, service, make))
    return uvloop.run(_serve(config, service, make))


def allow_descriptors() -> None:
    """Each client connection takes one file descriptor, and the usual soft limit of 1024 is for programs that call
    select."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < DESCRIPTORS:
        allowed = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


async def _serve(config: DaemonConfig, service: str, make: Callable[[], Daemon]) -> int:
    log = get_logger()
    try:
        door = Door()
        daemon = make()
    except RelaxError as error:
        return _fail(service, error)
    server = grpc.aio.server(interceptors=(door,), options=SERVER_OPTIONS)
    daemon.add_to(server)
    health_servicer = _add_standard_services(server, daemon.service_names)
    host = config.listen.rpartition(":")[0]
    try:
        port = _bind(server, config.listen)
        metrics_port = start_metrics_server(config.metrics_listen)
    except OSError as error:
        words = error.strerror or str(error)
        print(f"{service}: {words}; choose another --listen / --metrics-listen", file=sys.stderr)
        return EXIT_PORT_IN_USE if error.errno == errno.EADDRINUSE else EXIT_BAD_CONFIG
    await server.start()
    address, metrics_address = f"{host}:{port}", f"{host}:{metrics_port}"
    _write_address(config, address)
    for name in daemon.service_names:
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    collect_seldom()
    log.info("serving", address=address, metrics=metrics_address, pid=os.getpid())
    notify("READY=1")
    try:
        return await _work(daemon, address, metrics_address, service)
    finally:
        await health_servicer.enter_graceful_shutdown()
        notify("STOPPING=1")
        await server.stop(grace=0.5)
        log.info("stopped")


async def _work(daemon: Daemon, address: str, metrics_address: str, service: str) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopped.set)
    work = asyncio.create_task(daemon.run(address, metrics_address))
    stop = asyncio.create_task(stopped.wait())
    lag = asyncio.create_task(_watch_loop_lag())
    try:
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            get_logger().info("draining", deadline_seconds=DRAIN_SECONDS)
            await asyncio.wait_for(daemon.drain(), DRAIN_SECONDS)
            work.cancel()
        return await work
    except asyncio.CancelledError:
        return 0
    except TimeoutError:
        return _fail(service, DeadlineExceeded(f"drain did not end within {DRAIN_SECONDS:.0f} s"))
    except RelaxError as error:
        return _fail(service, error)
    finally:
        lag.cancel()
        stop.cancel()


def _fail(service: str, error: RelaxError) -> int:
    """Prints the reason in one line; the exit code tells whether starting again can help."""
    get_logger().error("failed", error=error.message)
    print(f"{service}: {error.message}", file=sys.stderr)
    if isinstance(error, StaleTerm):
        return EXIT_STALE_TERM
    return EXIT_BAD_CONFIG if isinstance(error, InvalidInput) else EXIT_FAILED


def _add_standard_services(server: grpc.aio.Server, names: tuple[str, ...]) -> health.aio.HealthServicer:
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    channelz.add_channelz_servicer(server)
    reflection.enable_server_reflection(
        (*names, health.SERVICE_NAME, "grpc.channelz.v1.Channelz", reflection.SERVICE_NAME), server
    )
    return servicer


def _bind(server: grpc.aio.Server, listen: str) -> int:
    # Tried with a plain socket first: gRPC logs a paragraph of its own and does not give the reason.
    _check_free(listen)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(errno.EADDRINUSE, f"cannot listen on {listen}: the address was taken a moment ago") from error
    if port == 0:
        raise OSError(errno.EADDRINUSE, f"cannot listen on {listen}: the address was taken a moment ago")
    return port


def _check_free(listen: str) -> None:
    if listen.startswith("unix:"):
        return
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, int(port)), family=family).close()
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {listen}: {error.strerror}") from error


def _write_address(config: DaemonConfig, address: str) -> None:
    if config.address_file is None:
        return
    temporary = config.address_file.with_name(config.address_file.name + ".tmp")
    temporary.write_text(address + "\n")
    temporary.replace(config.address_file)


async def _watch_loop_lag() -> None:
    loop = asyncio.get_running_loop()
    while True:
        before = loop.time()
        await asyncio.sleep(_LAG_PROBE_SECONDS)
        LOOP_LAG_SECONDS.set(max(0.0, loop.time() - before - _LAG_PROBE_SECONDS))
        notify("WATCHDOG=1")


def notify(state: str) -> None:
    """sd_notify: tell systemd, if it asked for it."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect("\0" + path[1:] if path.startswith("@") else path)
        sock.sendall(state.encode())
