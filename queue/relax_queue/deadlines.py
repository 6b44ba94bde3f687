"""How long a call may wait at the broker."""

import time
from typing import Protocol

from relax_common.rpc.channels import DEFAULT_DEADLINE_SECONDS


class HasDeadline(Protocol):
    def time_remaining(self) -> float | None: ...


def wait_end(context: HasDeadline) -> float:
    """End of a wait in time.monotonic() seconds: a little before the caller's deadline, so that it hears the reason."""
    left = context.time_remaining()
    if left is None:
        left = DEFAULT_DEADLINE_SECONDS
    return time.monotonic() + max(0.0, left - min(0.25, 0.25 * left))
