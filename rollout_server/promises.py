"""Futures that a thread resolves for whoever waits."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any


def promise() -> Future[Any]:
    """A future that its waiter cannot cancel.

    A cancelled future refuses its result with an error. That would end the thread that all other waiters rely on, only
    because one of them went away.
    """
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
