"""A checkpoint on disk: weights that transformers loads, every rank's state, and a manifest that is written last.

    version-00000041.0/            number and lineage of the policy version
        manifest.json              what the others are, with sizes and hashes; without it there is no checkpoint
        weights/                   a Hugging Face folder: safetensors, config.json, tokenizer
        state/actor-0.safetensors  parameters, optimizer, counters and random generators of one rank
        pinned                     exists where retention must leave the checkpoint alone

A folder gets its name only when all of it is on disk: one whose name begins with a dot is unfinished or being deleted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from relax_common.errors import DataLoss
from relax_common.versions import PolicyVersion

FORMAT = 1
MANIFEST = "manifest.json"
PINNED = "pinned"
WEIGHTS = "weights"
STATE = "state"
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class CheckpointFile:
    """`path` is relative to the checkpoint; `hash` is xxh3-64 as 16 hex digits."""

    path: str
    size_bytes: int
    hash: str


@dataclass(frozen=True)
class Manifest:
    """`step` trained the version; `dcs_revision` is its commit record, to which the data position belongs."""

    format: int
    run: str
    lineage: int
    number: int
    step: int
    attempt: int
    dcs_revision: int
    optimizer_updates: int
    manifest_hash: str
    saved_unix_seconds: float
    files: tuple[CheckpointFile, ...]

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.lineage, self.number)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


@dataclass(frozen=True)
class Found:
    """A folder that has a checkpoint's name; `fault` says why it cannot be used, and is empty if it can."""

    folder: Path
    version: PolicyVersion
    manifest: Manifest | None
    fault: str

    @property
    def pinned(self) -> bool:
        return (self.folder / PINNED).exists()


def follow_umask(path: Path) -> None:
    """Give a file made by a library the mode that `open` would have given it."""
    probe = path.with_name(f".{path.name}.mode")
    descriptor = os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    try:
        path.chmod(os.fstat(descriptor).st_mode & 0o777)
    finally:
        os.close(descriptor)
        probe.unlink()


def state_file(role: str, rank: int) -> str:
    return f"{STATE}/{role}-{rank}.safetensors"


def folder_name(version: PolicyVersion) -> str:
    return f"version-{version.number:08d}.{version.lineage}"


def version_of(name: str) -> PolicyVersion | None:
    """The version in a folder's name; None if it is not the name of a checkpoint."""
    match = re.fullmatch(r"version-([0-9]+)\.([0-9]+)", name)
    return PolicyVersion(int(match[2]), int(match[1])) if match else None


def read_manifest(folder: Path) -> Manifest:
    """Raises DataLoss in one line where the manifest is missing or damaged, or a file is missing or cut short."""
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        manifest = Manifest(**raw | {"files": tuple(CheckpointFile(**each) for each in raw["files"])})
    except OSError as error:
        raise DataLoss(f"checkpoint {folder}: {MANIFEST}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise DataLoss(f"checkpoint {folder}: {MANIFEST} is damaged: {error}") from error
    if manifest.format != FORMAT:
        raise DataLoss(f"checkpoint {folder}: format {manifest.format}, this release reads {FORMAT}")
    for file in manifest.files:
        try:
            size = (folder / file.path).stat().st_size
        except OSError as error:
            raise DataLoss(f"checkpoint {folder}: {file.path}: {error.strerror}") from error
        if size != file.size_bytes:
            raise DataLoss(f"checkpoint {folder}: {file.path} has {size} of its {file.size_bytes} bytes")
    return manifest


def check_hashes(folder: Path, manifest: Manifest) -> None:
    """Read every file. Raises DataLoss at the first whose content is not what was saved."""
    for file in manifest.files:
        if hash_file(folder / file.path) != file.hash:
            raise DataLoss(f"checkpoint {folder}: the content of {file.path} is not what was saved")


def hash_file(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def find_checkpoints(base: Path) -> Iterator[Found]:
    """All of a folder, oldest first, faulty ones too."""
    named = [(version, path) for path in base.glob("version-*") if (version := version_of(path.name)) is not None]
    for version, folder in sorted(named, key=lambda each: (each[0].number, each[0].lineage)):
        try:
            yield Found(folder, version, read_manifest(folder), "")
        except DataLoss as error:
            yield Found(folder, version, None, error.message)


def delete_checkpoint(folder: Path) -> None:
    """Delete it. Readers stop seeing it at once, even if the rest of the deletion is interrupted."""
    doomed = folder.with_name(f".deleted-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def clear_unfinished(base: Path) -> list[str]:
    """Remove what an interrupted save or deletion has left; returns the names."""
    left = [path for path in base.glob(".*-version-*") if path.is_dir()]
    for path in left:
        shutil.rmtree(path)
    return [path.name for path in left]
