"""The kinds of error, one class per gRPC code. Each has a message for people and a reason for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import grpc


class RelaxError(Exception):
    """An error that may cross a wire. `details` are for machines; the message alone must be enough for a person.

    A subclass with `REASON` set represents exactly one reason (see `relax_common.errors.reasons`), so that callers
    write `except PlanLost` instead of comparing strings.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    REASON: ClassVar[str] = ""

    def __init__(self, message: str, *, reason: str = "", details: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.REASON or self.code.name
        self.details = dict(details or {})


class InvalidInput(RelaxError):
    """The request or file is wrong; repeating it cannot help."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(RelaxError):
    """The thing named does not exist, or no longer exists."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(RelaxError):
    """The key is stored with other content."""

    code = grpc.StatusCode.ALREADY_EXISTS


class Precondition(RelaxError):
    """The state does not allow this now."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Exhausted(RelaxError):
    """A budget would be exceeded; nothing was stored."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(RelaxError):
    """The peer is starting, draining or gone; the same call may succeed later."""

    code = grpc.StatusCode.UNAVAILABLE


class Unauthenticated(RelaxError):
    """The caller did not send the token of this installation."""

    code = grpc.StatusCode.UNAUTHENTICATED


class DeadlineExceeded(RelaxError):
    """A wait ended; the message names what was missing."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED

    @property
    def missing(self) -> str:
        """What the wait was for, to follow the words "waits for"."""
        return self.details.get("missing", self.message)


class DataLoss(RelaxError):
    """Bytes do not match their checksum."""

    code = grpc.StatusCode.DATA_LOSS
