"""Lets threads use asynchronous clients: one event loop per process, in its own thread.

Each client is written once, as coroutines. A server uses it on its own loop; a thread, such as that of a trainer rank,
hands its calls to the portal and waits.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

_END: Any = object()


class Portal:
    """Runs coroutines for other threads. Each coroutine has its own deadline, so no thread waits without one."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="portal", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or its exception. A thread that is interrupted cancels the work."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a coroutine must await the asynchronous client; the portal is for threads")
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        finally:
            running.cancel()

    def make(self, build: Callable[[], T]) -> T:
        """The result of `build`, called on the loop: clients must be made on the loop that uses them."""

        async def on_loop() -> T:
            return build()

        return self.call(on_loop())

    def iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        """The items of an asynchronous iterator; each is fetched when the thread asks for it."""

        async def following() -> T:
            return await anext(source, _END)

        try:
            while (item := self.call(following())) is not _END:
                yield item
        finally:
            close = getattr(source, "aclose", None)
            if close is not None:
                self.call(close())


def promise() -> Future[Any]:
    """A future that a thread resolves, and that its waiter cannot cancel.

    A cancelled future refuses its result with an error. That would end the thread that all other waiters rely on, only
    because one of them went away.
    """
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


_lock = threading.Lock()
_portal: Portal | None = None


def portal() -> Portal:
    """The portal of this process; its thread starts with the first use."""
    global _portal
    with _lock:
        if _portal is None:
            _portal = Portal()
        return _portal
