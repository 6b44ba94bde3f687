"""Errors on the wire: google.rpc.Status with an ErrorInfo, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from relax_common.errors.base import RelaxError
from relax_common.errors.reasons import BY_REASON

DOMAIN = "relax"
TRAILER_BYTES_MAX = 7000
"""gRPC gives a caller RESOURCE_EXHAUSTED in place of an error whose trailers exceed 8 KiB. They contain the message
twice: percent-encoded, which triples what is not printable ASCII, and in base64."""
SHORTENED_BYTES = 1500
"""Of a message that is too long. Whatever its characters are, the trailers hold so much."""

_BY_CODE = {cls.code: cls for cls in RelaxError.__subclasses__()}
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def to_status(error: RelaxError) -> status_pb2.Status:
    """google.rpc.Status with an ErrorInfo that carries reason and details."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.details)
    detail = any_pb2.Any()
    detail.Pack(info)
    code = getattr(code_pb2, error.code.name)
    return status_pb2.Status(code=code, message=shortened(error.message), details=[detail])


def shortened(message: str) -> str:
    """The message with its middle left out if it is too long, as one that repeats what a caller sent may be."""
    encoded = message.encode()
    printable = sum(0x20 <= byte <= 0x7E and byte != ord("%") for byte in encoded)
    if 3 * len(encoded) - 2 * printable + len(encoded) * 4 // 3 <= TRAILER_BYTES_MAX:
        return message
    half = SHORTENED_BYTES // 2
    begin, end = encoded[:half].decode(errors="ignore"), encoded[-half:].decode(errors="ignore")
    return f"{begin} ... {len(encoded) - 2 * half} bytes are left out ... {end}"


class _AbortsWithStatus(Protocol):
    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: object) -> NoReturn: ...


async def abort(context: _AbortsWithStatus, error: RelaxError) -> NoReturn:
    """End an RPC with the error's code, message and details."""
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returned")


class CallFailed(grpc.RpcError):
    """A failed call that did not use gRPC; code that handles errors of gRPC calls handles it in the same way."""

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
    """The class of a reason; if the reason has none, the class of the code."""
    cls = BY_REASON.get(reason) or _BY_CODE.get(code, RelaxError)
    return cls(message, reason=reason, details=details)


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
