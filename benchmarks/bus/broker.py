"""A queue daemon for benchmarks, as its users start it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.bus.measure import rss_bytes

START_SECONDS = 60.0


class QueueDaemon:
    """Runs while the context lasts; its state is thrown away."""

    def __init__(self, arena_bytes: int = 1 << 30) -> None:
        self._arena_bytes = arena_bytes

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="queue-bench-")
        folder = Path(self._folder.name)
        address = folder / "address"
        words = ["--listen", "127.0.0.1:0", "--state-dir", folder / "state", "--address-file", address]
        words += ["--arena-bytes", self._arena_bytes, "--log-level", "warning"]
        self._process = subprocess.Popen([sys.executable, "-m", "relax_queue", *map(str, words)])
        end = time.monotonic() + START_SECONDS
        while not address.exists():
            if self._process.poll() is not None or time.monotonic() > end:
                raise SystemExit("queue_bench: the queue daemon did not start; its words are above")
            time.sleep(0.02)
        self.address = address.read_text().strip()
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    def memory_bytes(self) -> int:
        """All resident memory of the daemon: its own and the arena, no matter which process touched it."""
        return rss_bytes(self.pid, "RssAnon") + self._arena_resident()

    def _arena_resident(self) -> int:
        for link in Path(f"/proc/{self.pid}/fd").iterdir():
            try:
                if "relax-queue-arena" in str(link.readlink()):
                    return link.stat().st_blocks * 512
            except FileNotFoundError:
                continue  # closed while we looked
        return 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._folder.cleanup()
