"""A checkpoint on disk: written whole or not at all, checked before it is used, kept and deleted by rule."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file

from dcs.checkpoints import writer as checkpoint_writer
from dcs.checkpoints.saver import Checkpoints
from dcs.checkpoints.writer import Content, write_checkpoint
from relax.dcs.v1 import dcs_pb2
from relax_common.errors import DataLoss, NotFound, Precondition
from relax_common.storage.checkpoint_folder import (
    MANIFEST,
    check_hashes,
    clear_unfinished,
    delete_checkpoint,
    find_checkpoints,
    folder_name,
    read_manifest,
    state_file,
    version_of,
)
from relax_common.versions import PolicyVersion


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4, "torch_dtype": "bfloat16"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"the base checkpoint's weights stay where they are")
    return folder


def content(number: int, lineage: int = 0, dtype: str = "F32") -> Content:
    """A [4, 3] matrix in two slices by rows, a [2, 4] one in two by columns, and a whole vector."""
    kind = {"F32": torch.float32, "BF16": torch.bfloat16}[dtype]
    rows, columns = (torch.arange(n, dtype=torch.float32) + number for n in (12, 8))
    whole = {"a": rows.view(4, 3).to(kind), "b": columns.view(2, 4).to(kind), "c": torch.full((5,), 1.5).to(kind)}
    cuts = {"a": [(slice(0, 2), slice(0, 3)), (slice(2, 4), slice(0, 3))], "b": [(slice(0, 2), slice(0, 1)),
            (slice(0, 2), slice(1, 4))], "c": [(slice(0, 5),)]}  # fmt: skip
    slices = []
    for name, tensor in whole.items():
        for cut in cuts[name]:
            data = tensor[cut].contiguous().view(torch.uint8).numpy().tobytes()
            entry = dcs_pb2.Slice(
                name=name,
                full_shape=tensor.shape,
                start=[each.start for each in cut],
                extent=[each.stop - each.start for each in cut],
                dtype=dtype,
                size_bytes=len(data),
            )
            slices.append((entry, data))
    version = PolicyVersion(lineage, number)
    commit = dcs_pb2.CommitRecord(version=version.to_proto(), step=number - 1, attempt=7, optimizer_updates=number)
    states = {("actor", 0): bytes([number]) * 64, ("actor", 1): b"x"}
    hashes = {key: xxhash.xxh3_64_intdigest(state) for key, state in states.items()}
    return Content("r", commit, 20, slices, states, hashes)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_slices_of_all_ranks_become_the_tensors_that_transformers_reads(
    tmp_path: Path, model_folder: Path, dtype: str
) -> None:
    folder = write_checkpoint(tmp_path, content(3, dtype=dtype), model_folder)
    tensors = load_file(folder / "weights" / "model.safetensors")
    assert tensors["a"].float().flatten().tolist() == [float(i + 3) for i in range(12)]
    assert tensors["b"].float().flatten().tolist() == [float(i + 3) for i in range(8)]
    assert tensors["c"].tolist() == [1.5] * 5
    config = json.loads((folder / "weights" / "config.json").read_text())
    assert config == {"hidden_size": 4, "dtype": str(tensors["a"].dtype).removeprefix("torch.")}
    assert (folder / "weights" / "tokenizer.json").exists()
    manifest = read_manifest(folder)
    assert (manifest.version, manifest.step, manifest.optimizer_updates) == (PolicyVersion(0, 3), 2, 3)
    check_hashes(folder, manifest)


def test_many_files_get_an_index(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "FILE_BYTES_MAX", 60)
    folder = write_checkpoint(tmp_path, content(1), model_folder) / "weights"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * (12 + 8 + 5)
    assert sorted(index["weight_map"]) == ["a", "b", "c"]
    for name, file in index["weight_map"].items():
        assert name in load_file(folder / file)
    assert not (folder / "model.safetensors").exists()


def test_a_disk_that_is_full_leaves_nothing_behind(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "checkpoints"
    base.mkdir()

    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(base, content(2), model_folder)
    assert list(base.iterdir()) == []


Damage = Callable[[Path], object]


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _other_content(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / MANIFEST).unlink(), "manifest.json"),
        (lambda f: (f / MANIFEST).write_text("{"), "damaged"),
        (lambda f: (f / MANIFEST).write_text((f / MANIFEST).read_text().replace('"format": 1', '"format": 9')), "9"),
        (lambda f: (f / state_file("actor", 1)).unlink(), "actor-1"),
        (lambda f: _cut(f / state_file("actor", 0)), "54 of its 64 bytes"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_not_used(
    tmp_path: Path, model_folder: Path, damage: Damage, says: str
) -> None:
    folder = write_checkpoint(tmp_path, content(2), model_folder)
    damage(folder)
    with pytest.raises(DataLoss, match=says) as caught:
        read_manifest(folder)
    assert "\n" not in caught.value.message
    [found] = find_checkpoints(tmp_path)
    assert found.manifest is None
    assert says in found.fault


def test_other_content_of_the_same_size_is_found_by_its_hash(tmp_path: Path, model_folder: Path) -> None:
    folder = write_checkpoint(tmp_path, content(2), model_folder)
    _other_content(folder / "weights" / "model.safetensors")
    with pytest.raises(DataLoss, match=r"model\.safetensors is not what was saved"):
        check_hashes(folder, read_manifest(folder))


def test_names_of_folders_and_what_interruptions_leave(tmp_path: Path, model_folder: Path) -> None:
    version = PolicyVersion(3, 41)
    assert version_of(folder_name(version)) == version
    assert version_of("version-x.0") is None
    assert version_of("notes") is None
    folder = write_checkpoint(tmp_path, content(2), model_folder)
    (tmp_path / ".unfinished-version-00000009.0").mkdir()
    delete_checkpoint(folder)
    assert clear_unfinished(tmp_path) == [".unfinished-version-00000009.0"]
    assert list(find_checkpoints(tmp_path)) == []


class Log:
    """What Checkpoints asks of the commit log."""

    def __init__(self) -> None:
        self.lineage = 0
        self.recorded: list[PolicyVersion] = []

    def on_line(self, version: PolicyVersion) -> bool:
        return version.lineage == self.lineage

    async def record(self, version: PolicyVersion) -> None:
        self.recorded.append(version)


def checkpoints_of(base: Path, model_folder: Path, log: Log, keep: int = 2) -> Checkpoints:
    policy = dcs_pb2.CheckpointPolicy(every_steps=2, folder=str(base), keep=keep, model_folder=str(model_folder))
    return Checkpoints(policy, log.on_line, log.record)


async def _save(checkpoints: Checkpoints, what: Content) -> None:
    released: list[bool] = []
    checkpoints.start(what, lambda: released.append(True))
    await checkpoints.finish()
    assert released == [True]


def test_the_newest_and_the_pinned_ones_stay(tmp_path: Path, model_folder: Path) -> None:
    async def story() -> None:
        log = Log()
        checkpoints = checkpoints_of(tmp_path / "c", model_folder, log)
        assert not checkpoints.due(PolicyVersion(0, 0))
        assert not checkpoints.due(PolicyVersion(0, 3))
        assert checkpoints.due(PolicyVersion(0, 2))
        await _save(checkpoints, content(2))
        assert not checkpoints.due(PolicyVersion(0, 2))
        checkpoints.pin(PolicyVersion(0, 2), True)
        for number in (4, 6, 8):
            await _save(checkpoints, content(number))
        assert [found.version.number for found in checkpoints.list()] == [2, 6, 8]
        assert [version.number for version in log.recorded] == [2, 4, 6, 8]
        with pytest.raises(Precondition, match="pinned"):
            checkpoints.delete(PolicyVersion(0, 2))
        checkpoints.pin(PolicyVersion(0, 2), False)
        checkpoints.delete(PolicyVersion(0, 2))
        with pytest.raises(NotFound, match=r"there are 0\.6, 0\.8"):
            checkpoints.pin(PolicyVersion(0, 5), True)

    asyncio.run(story())


def test_a_save_that_ends_after_a_rollback_is_never_loaded(tmp_path: Path, model_folder: Path) -> None:
    async def story() -> None:
        log = Log()
        checkpoints = checkpoints_of(tmp_path / "c", model_folder, log)
        checkpoints.start(content(2), lambda: None)
        log.lineage = 1
        await checkpoints.finish()
        assert not checkpoints.usable(PolicyVersion(0, 2))
        assert checkpoints.list() == []
        assert log.recorded == []

    asyncio.run(story())


def test_a_failed_save_is_counted_named_and_made_up_for(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        checkpoints = checkpoints_of(tmp_path / "c", model_folder, Log())
        await _save(checkpoints, content(2))
        with monkeypatch.context() as patch:
            patch.setattr(np, "frombuffer", _no_space)
            await _save(checkpoints, content(4))
        assert checkpoints.failures_in_a_row == 1
        assert "version 0.4" in checkpoints.last_error
        assert "No space left on device" in checkpoints.last_error
        assert str(tmp_path) in checkpoints.last_error
        assert checkpoints.usable(PolicyVersion(0, 2))
        assert checkpoints.due(PolicyVersion(0, 5)), "what was owed is due at the next recovery point"
        await _save(checkpoints, content(5))
        assert (checkpoints.failures_in_a_row, checkpoints.last_error) == (0, "")
        assert not checkpoints.due(PolicyVersion(0, 7))

    asyncio.run(story())


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_restart_knows_what_is_whole_and_reads_states_by_their_hash(tmp_path: Path, model_folder: Path) -> None:
    async def story() -> None:
        before = checkpoints_of(tmp_path / "c", model_folder, Log())
        for number in (2, 4):
            await _save(before, content(number))
        _cut(before.folder_of(PolicyVersion(0, 4)) / state_file("actor", 0))
        after = checkpoints_of(tmp_path / "c", model_folder, Log())
        assert after.usable(PolicyVersion(0, 2))
        assert not after.usable(PolicyVersion(0, 4))
        assert after.read_state(PolicyVersion(0, 2), "actor", 0)[0] == bytes([2]) * 64
        with pytest.raises(NotFound, match="neither in memory nor on disk"):
            after.read_state(PolicyVersion(0, 2), "actor", 5)
        _other_content(after.folder_of(PolicyVersion(0, 2)) / state_file("actor", 0))
        with pytest.raises(DataLoss, match="not what was saved"):
            after.read_state(PolicyVersion(0, 2), "actor", 0)
        assert not after.usable(PolicyVersion(0, 2))

    asyncio.run(story())
