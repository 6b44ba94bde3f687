"""Whether the data is still what a run began with: group ids name rows by their position."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import xxhash

from relax_common.errors import DataChanged
from relaxd.data.row import PromptRow

FILE = "data.rows"
_DIGEST_BYTES = 8


def check_unchanged(run_dir: Path, rows: Sequence[PromptRow]) -> None:
    """The first call for a run remembers its rows; later calls raise DataChanged, naming the first difference."""
    path = run_dir / FILE
    if not path.exists():
        remember(run_dir, rows)
        return
    known, now = _split(path.read_bytes()), [_digest(row) for row in rows]
    at = next((i for i, (one, other) in enumerate(zip_longest(known, now)) if one != other), None)
    if at is None:
        return
    counts = "" if len(known) == len(now) else f"it had {len(known)} rows and has {len(now)}; "
    where = rows[at].where if at < len(rows) else f"row {at + 1}, which is gone"
    raise DataChanged(
        f"the data of run {run_dir.name} has changed since the run began: {counts}the first difference is {where}. "
        "Restore it, or go on with the new rows by `relaxctl resume --accept-changed-data`: groups that were trained "
        "stay trained, and every position then means its new row"
    )


def remember(run_dir: Path, rows: Sequence[PromptRow]) -> None:
    """Remember these rows as the run's from now on."""
    path = run_dir / FILE
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(b"".join(_digest(row) for row in rows))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _digest(row: PromptRow) -> bytes:
    return xxhash.xxh3_64_digest("\0".join((row.prompt_json, row.label or "", row.metadata_json)).encode())


def _split(digests: bytes) -> list[bytes]:
    return [digests[at : at + _DIGEST_BYTES] for at in range(0, len(digests), _DIGEST_BYTES)]
