"""Writes a checkpoint from bytes in memory. Runs in its own thread and touches no state of the daemon."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, TensorSpec, serialize_file

from relax.dcs.v1 import dcs_pb2
from relax_common.failpoints import failpoint
from relax_common.storage import checkpoint_folder as folders
from relax_common.storage.checkpoint_folder import CheckpointFile, Manifest
from relax_common.storage.framed_log import fsync_folder
from relax_common.tensors import ELEMENT_TYPES, WholeTensor, assemble
from relax_common.versions import PolicyVersion

FILE_BYTES_MAX = 4 << 30
# Files next to the weights in a Hugging Face folder that are needed to use them.
_BESIDE_WEIGHTS = ("tokenizer*", "vocab*", "merges*", "special_tokens_map*", "added_tokens*", "chat_template*",
                   "generation_config.json")  # fmt: skip


@dataclass(frozen=True)
class Content:
    """Everything of one version. `states`, and their xxh3-64 `hashes`, are by (role, rank)."""

    run: str
    commit: dcs_pb2.CommitRecord
    dcs_revision: int
    slices: Sequence[tuple[dcs_pb2.Slice, memoryview]]
    states: Mapping[tuple[str, int], memoryview]
    hashes: Mapping[tuple[str, int], int]

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion.from_proto(self.commit.version)

    @property
    def size_bytes(self) -> int:
        return sum(len(data) for _, data in self.slices) + sum(len(state) for state in self.states.values())


def write_checkpoint(base: Path, content: Content, model_folder: Path) -> Path:
    """Returns the finished folder below `base`. On failure (a full disk) raises OSError and leaves nothing there."""
    final = base / folders.folder_name(content.version)
    if not base.is_dir():
        base.mkdir(parents=True, exist_ok=True)
        fsync_folder(base.parent)
    unfinished = base / f".unfinished-{final.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        (unfinished / folders.WEIGHTS).mkdir(parents=True)
        (unfinished / folders.STATE).mkdir()
        _write_weights(content.slices, unfinished / folders.WEIGHTS)
        _write_beside(model_folder, unfinished / folders.WEIGHTS, content.slices[0][0].dtype)
        failpoint("dcs.checkpoint_half_written")
        for (role, rank), state in content.states.items():
            (unfinished / folders.state_file(role, rank)).write_bytes(state)
        manifest = _manifest(content, unfinished)
        (unfinished / folders.MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        _sync(unfinished)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    failpoint("dcs.checkpoint_before_rename")
    unfinished.rename(final)
    fsync_folder(base)
    return final


def _manifest(content: Content, folder: Path) -> Manifest:
    commit = content.commit
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return Manifest(
        format=folders.FORMAT,
        run=content.run,
        lineage=commit.version.lineage,
        number=commit.version.number,
        step=commit.step,
        attempt=commit.attempt,
        dcs_revision=content.dcs_revision,
        optimizer_updates=commit.optimizer_updates,
        manifest_hash=f"{commit.manifest_hash:016x}",
        saved_unix_seconds=time.time(),
        files=tuple(
            CheckpointFile(str(path.relative_to(folder)), path.stat().st_size, folders.hash_file(path))
            for path in paths
        ),
    )


def _write_weights(slices: Sequence[tuple[dcs_pb2.Slice, memoryview]], folder: Path) -> None:
    """One file, or numbered ones with an index. The tensors of one file at a time are assembled in memory."""
    by_name: dict[str, list[tuple[dcs_pb2.Slice, memoryview]]] = {}
    for entry, data in slices:
        by_name.setdefault(entry.name, []).append((entry, data))
    sizes = {name: sum(entry.size_bytes for entry, _ in parts) for name, parts in by_name.items()}
    files = list(_files(sizes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        # The hashes were checked when the bytes arrived.
        whole = assemble((part for name in names for part in by_name[name]), check_hashes=False)
        try:
            serialize_file({name: _spec(tensor) for name, tensor in whole.items()}, folder / file, {"format": "pt"})
        except SafetensorError as error:  # it wraps what the operating system said
            raise OSError(f"{file}: {error}") from error
        folders.follow_umask(folder / file)
        weight_map |= dict.fromkeys(names, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def _files(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if names and total + size > FILE_BYTES_MAX:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    yield names


def _spec(tensor: WholeTensor) -> TensorSpec:
    at = np.frombuffer(tensor.data, np.uint8).ctypes.data
    return TensorSpec(
        dtype=ELEMENT_TYPES[tensor.dtype].name, shape=list(tensor.shape), data_ptr=at, data_len=len(tensor.data)
    )


def _write_beside(model_folder: Path, folder: Path, dtype: str) -> None:
    config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = ELEMENT_TYPES[dtype].name
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for pattern in _BESIDE_WEIGHTS:
        for path in model_folder.glob(pattern):
            shutil.copy(path, folder / path.name)


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    for path in (*(each for each in folder.rglob("*") if each.is_dir()), folder):
        fsync_folder(path)
