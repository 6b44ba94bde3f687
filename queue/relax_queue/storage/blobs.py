"""Content-addressed blobs of a run, on disk next to its log: a prompt's media must be as durable as the prompt."""

import os
import re
from pathlib import Path

import xxhash

from relax_common.errors import InvalidInput, NotFound
from relax_common.storage.framed_log import durable_folder, fsync_folder
from relax_queue.rules.lifecycle import LIVE
from relax_queue.rules.state import Phase, RunState
from relax_queue.storage.disk import RESERVE_BYTES, check_room, disk_full, free_bytes

_HASH = re.compile(r"[0-9a-f]{32}")


class Blobs:
    """Blobs by hash; one that no live group refers to is freed, a fresh one stays until it is first referred to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        durable_folder(folder)
        for leftover in folder.glob("*.tmp"):
            leftover.unlink()
        self._fresh = {p.name for p in folder.iterdir() if _HASH.fullmatch(p.name)}
        self._used: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._fresh or name in self._used

    def put(self, name: str, content: bytes | bytearray | memoryview) -> None:
        """Durable before it returns; storing the same content again changes nothing."""
        if xxhash.xxh3_128_hexdigest(content) != name:
            raise InvalidInput(f"blob {name}: the content has hash {xxhash.xxh3_128_hexdigest(content)}")
        if self.has(name):
            return
        check_room(self._folder, RESERVE_BYTES + len(content))
        temporary = self._folder / f"{name}.tmp"
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise disk_full(self._folder, free_bytes(self._folder), len(content)) from error
        temporary.replace(self._folder / name)
        fsync_folder(self._folder)
        self._fresh.add(name)

    def get(self, name: str) -> bytes:
        if not self.has(name):
            raise NotFound(f"blob {name} is not stored: it was never put, or no group refers to it any more")
        return (self._folder / name).read_bytes()

    def sweep(self, state: RunState) -> None:
        """Free what is no longer referred to."""
        if not self._fresh and not self._used:
            return
        referred = {b for g in state.groups.values() if g.status in LIVE or g.reserved for b in g.prompt.blobs}
        for name in self._used - referred:
            (self._folder / name).unlink(missing_ok=True)
        self._used = (self._used | self._fresh) & referred
        self._fresh -= referred
        if state.phase is Phase.ENDED:
            for name in self._fresh:
                (self._folder / name).unlink(missing_ok=True)
            self._fresh.clear()
