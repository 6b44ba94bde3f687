"""Errors that cross a wire: a class per gRPC code, a machine-readable reason, google.rpc.Status both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "relax"

STALE_TERM = "STALE_TERM"
PLAN_LOST = "PLAN_LOST"
ATTEMPT_GONE = "ATTEMPT_GONE"
LEASE_GONE = "LEASE_GONE"
BYTES_LOST = "BYTES_LOST"
ROWS_FREED = "ROWS_FREED"
RUN_ENDED = "RUN_ENDED"
DISK_FULL = "DISK_FULL"
EVENTS_COMPACTED = "EVENTS_COMPACTED"
SNAPSHOT_MISSING = "SNAPSHOT_MISSING"
PROTOCOL_MISMATCH = "PROTOCOL_MISMATCH"
ARENA_FULL = "ARENA_FULL"
SLAB_GONE = "SLAB_GONE"
UNKNOWN_SESSION = "UNKNOWN_SESSION"
MEMORY_OUT_OF_REACH = "MEMORY_OUT_OF_REACH"


class RelaxError(Exception):
    """Carries one line for people, a reason for machines and details; maps to one gRPC code."""

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, *, reason: str = "", details: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.code.name
        self.details = dict(details or {})


class InvalidInput(RelaxError):
    """The request or file is wrong; repeating it cannot help."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(RelaxError):
    """The thing named does not exist (any more)."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(RelaxError):
    """The key is stored with other content."""

    code = grpc.StatusCode.ALREADY_EXISTS


class Precondition(RelaxError):
    """The state does not allow this now: an old term, a lost plan, a lease that is gone."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Exhausted(RelaxError):
    """A budget would be exceeded; nothing was stored."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(RelaxError):
    """The peer is starting, draining or gone; the same call may succeed later."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(RelaxError):
    """A wait ended; the message names what was missing."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class DataLoss(RelaxError):
    """Bytes do not match their checksum."""

    code = grpc.StatusCode.DATA_LOSS


_BY_CODE = {cls.code: cls for cls in RelaxError.__subclasses__()}
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class StaleTerm(Precondition):
    """A newer incarnation of the caller exists; the caller must exit."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason=STALE_TERM)


def to_status(error: RelaxError) -> status_pb2.Status:
    """google.rpc.Status with an ErrorInfo that carries reason and details."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.details)
    detail = any_pb2.Any()
    detail.Pack(info)
    code = getattr(code_pb2, error.code.name)
    return status_pb2.Status(code=code, message=error.message, details=[detail])


class _AbortsWithStatus(Protocol):
    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: object) -> NoReturn: ...


async def abort(context: _AbortsWithStatus, error: RelaxError) -> NoReturn:
    """End an RPC with the error's code, message and details."""
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returned")


class CallFailed(grpc.RpcError):
    """A call that did not travel by gRPC has failed; what handles errors of calls handles it alike."""

    def __init__(self, error: RelaxError) -> None:
        super().__init__(error.message)
        self.error = error


def from_rpc(error: grpc.RpcError) -> RelaxError:
    """The typed error that a peer sent; also for errors of gRPC itself (unreachable peer, deadline)."""
    if isinstance(error, CallFailed):
        return error.error
    if not isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        return RelaxError(str(error))
    code: grpc.StatusCode = error.code()
    message = error.details() or code.name
    info = _error_info(error)
    return typed_error(code, message, info.reason if info else "", dict(info.metadata) if info else {})


def typed_error(code: grpc.StatusCode, message: str, reason: str, details: Mapping[str, str]) -> RelaxError:
    """The class for a code that came over a wire."""
    if reason == STALE_TERM:
        return StaleTerm(message)
    return _BY_CODE.get(code, RelaxError)(message, reason=reason, details=details)


def from_status(status: status_pb2.Status) -> RelaxError:
    """The reverse of to_status."""
    info = _info_of(status) or error_details_pb2.ErrorInfo()
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return typed_error(code, status.message, info.reason, dict(info.metadata))


def _error_info(error: grpc.Call | grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    # Both the sync and the aio error carry trailing metadata; grpc_status.from_call accepts only the sync one.
    metadata: Any = error.trailing_metadata()
    for key, value in metadata or ():
        if key != "grpc-status-details-bin":
            continue
        raw = value if isinstance(value, bytes) else value.encode()
        return _info_of(status_pb2.Status.FromString(raw))
    return None


def _info_of(status: status_pb2.Status) -> error_details_pb2.ErrorInfo | None:
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return info
    return None
