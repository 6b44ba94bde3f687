"""The run directory: append-only files of JSON lines. Their last lines tell a restarted relaxd where to continue."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

Event = dict[str, Any]
"""source, revision, time (unix seconds), kind, group, and the details of the kind"""


class JsonLines:
    """A file of JSON objects, one per line. A line torn by a crash is cut off when the file is opened.

    Lines wait in memory until `flush` has written all of them. A flush that fails, because the disk is full, leaves
    whole lines in the file and the others in memory, so it can be repeated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        raw = path.read_bytes()
        self._size = raw.rfind(b"\n") + 1
        if self._size < len(raw):
            os.ftruncate(self._fd, self._size)
        self._pending: list[bytes] = []

    def append(self, value: dict[str, Any]) -> None:
        # allow_nan: a metrics file must stay valid JSON, so a NaN must fail here and not when the file is read.
        self._pending.append(json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n")

    def flush(self) -> None:
        data = memoryview(b"".join(self._pending))
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], self._size + done)
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)
        self._pending.clear()

    def close(self) -> None:
        """Close the file. Lines that have not reached it are fetched again later, from where the file ends."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            self.flush()
        os.close(self._fd)
        self._fd = -1


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        for line in file:
            yield json.loads(line)


def flat_event(source: str, revision: int, time: Timestamp, kind: str, group: str, detail_json: str) -> Event:
    """One event of any daemon as a flat object."""
    detail = json.loads(detail_json) if detail_json else {}
    head: Event = {"source": source, "revision": revision, "time": time.ToNanoseconds() / 1e9, "kind": kind}
    return {**head, **({"group": group} if group else {}), **detail}


class EventLog:
    """events.jsonl of a run, written from several sources; each has its own revisions."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)
        self._last: dict[str, int] = {}
        # One revision of a source may cover several lines (a chunk plans many groups): the last one may be cut short.
        self._seen_at_last: dict[str, set[tuple[str, str]]] = {}
        for event in read_lines(path):
            self._note(event)

    def _note(self, event: Event) -> None:
        source, revision = event["source"], event["revision"]
        if revision != self._last.get(source):
            self._last[source] = revision
            self._seen_at_last[source] = set()
        self._seen_at_last[source].add((event["kind"], event.get("group", "")))

    def resume_after(self, source: str) -> int:
        """The revision from which to ask a source, so that nothing is missed; `append` drops events that are here
        already."""
        return max(0, self._last.get(source, 0) - 1)

    def append(self, event: Event) -> bool:
        """Returns False if the event is in the file already."""
        source, revision = event["source"], event["revision"]
        last = self._last.get(source, 0)
        if revision < last:
            return False
        if revision == last and (event["kind"], event.get("group", "")) in self._seen_at_last.get(source, set()):
            return False
        self._note(event)
        self._lines.append(event)
        return True

    def flush(self) -> None:
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()
