"""Files of a run's log: names that sort by revision, and reading single frames."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from relax_common.errors import DataLoss

_HEAD = struct.Struct("<II")
_LOG, _SNAPSHOT = "log-", "snapshot-"


@dataclass(slots=True, eq=False)
class Segment:
    """Transactions from `first_revision` on; the columns say at which byte each begins and are filled when needed."""

    first_revision: int
    path: Path
    first_revisions: array[int] = field(default_factory=lambda: array("Q"))
    positions: array[int] = field(default_factory=lambda: array("Q"))

    def note(self, revision: int, position: int) -> None:
        self.first_revisions.append(revision)
        self.positions.append(position)


def log_path(folder: Path, first_revision: int) -> Path:
    return folder / f"{_LOG}{first_revision:020d}"


def snapshot_path(folder: Path, revision: int) -> Path:
    return folder / f"{_SNAPSHOT}{revision:020d}"


def find_segments(folder: Path) -> list[Segment]:
    """In order."""
    return [Segment(int(p.name.removeprefix(_LOG)), p) for p in sorted(folder.glob(f"{_LOG}*"))]


def find_snapshots(folder: Path) -> list[tuple[int, Path]]:
    """(revision, file) of snapshots, oldest first; unfinished ones are not listed."""
    found = [p for p in sorted(folder.glob(f"{_SNAPSHOT}*")) if p.suffix != ".tmp"]
    return [(int(p.name.removeprefix(_SNAPSHOT)), p) for p in found]


def _ends_at(path: Path, position: int) -> bool:
    """After the last frame there is nothing, or zeros that a killed process left."""
    with path.open("rb") as file:
        file.seek(position)
        return not file.read(_HEAD.size).strip(b"\0")


def frames_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """All frames of a file, each with its position; raises DataLoss."""
    position = 0
    while not _ends_at(path, position):
        frame = read_frame(path, position)
        yield position, frame
        position += _HEAD.size + len(frame)


def read_frame(path: Path, position: int = 0) -> bytes:
    """One checksummed frame as relax_common.storage.framed_log writes it; raises DataLoss."""
    with path.open("rb") as file:
        file.seek(position)
        head = file.read(_HEAD.size)
        if len(head) == _HEAD.size:
            length, checksum = _HEAD.unpack(head)
            frame = file.read(length)
            if len(frame) == length and xxhash.xxh32_intdigest(frame) == checksum:
                return frame
    raise DataLoss(f"{path}: the frame at byte {position} is damaged; restore the file from a copy")
