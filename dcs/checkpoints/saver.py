"""A run's checkpoints: when one is due, saving it while training continues, which can be loaded, which are deleted.

A save takes references to bytes in memory when the recovery point F reaches its version, so neither trainer nor log
waits for the disk. One save runs at a time. If a version comes due during a save, or its save fails, the next recovery
point is saved in its place.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from dcs.checkpoints.writer import Content, write_checkpoint
from dcs.metrics import CHECKPOINT_FAILURES, CHECKPOINTS
from relax.dcs.v1 import dcs_pb2
from relax_common.errors import DataLoss, NotFound, Precondition
from relax_common.process.telemetry import get_logger
from relax_common.storage import checkpoint_folder as folders
from relax_common.storage.checkpoint_folder import Found, Manifest
from relax_common.versions import PolicyVersion


class Checkpoints:
    """`on_line` asks the log, `record` appends CHECKPOINT to it, durably."""

    def __init__(
        self,
        policy: dcs_pb2.CheckpointPolicy,
        on_line: Callable[[PolicyVersion], bool],
        record: Callable[[PolicyVersion], Awaitable[object]],
    ) -> None:
        self._policy = policy
        self._base = Path(policy.folder)
        self._model_folder = Path(policy.model_folder)
        self._on_line = on_line
        self._record = record
        self._usable: dict[PolicyVersion, Manifest] = {}
        self._owed = False
        self.task: asyncio.Task[None] | None = None
        """The save in progress."""
        self.failures_in_a_row = 0
        self.last_error = ""
        try:
            self._base.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            # An unmounted share: checkpoints saved there cannot be loaded, and each new save reports the problem.
            get_logger().error("checkpoint_folder_missing", folder=str(self._base), error=error.strerror)
        for name in folders.clear_unfinished(self._base):
            get_logger().warning("unfinished_checkpoint_removed", folder=name)
        for found in folders.find_checkpoints(self._base):
            if found.manifest is None:
                get_logger().warning("checkpoint_unusable", error=found.fault)
            else:
                self._usable[found.version] = found.manifest

    def folder_of(self, version: PolicyVersion) -> Path:
        return self._base / folders.folder_name(version)

    def usable(self, version: PolicyVersion) -> bool:
        """Whether the version was saved completely and its checkpoint still exists."""
        return version in self._usable and (self.folder_of(version) / folders.MANIFEST).exists()

    def due(self, version: PolicyVersion) -> bool:
        every = self._policy.every_steps
        return bool(version.number) and not self.usable(version) and (self._owed or version.number % every == 0)

    def start(self, content: Content, release: Callable[[], None]) -> None:
        """Save in the background; `release` is called when the bytes are no longer needed."""
        if self.task is not None:
            self.owe()
            release()
            return
        self._owed = False
        self.task = asyncio.create_task(self._save(content, release))

    def owe(self) -> None:
        """Called when a save that was due could not be started."""
        self._owed = True

    async def finish(self) -> None:
        """Wait for the save in progress, if any."""
        while self.task is not None:
            await asyncio.shield(self.task)

    async def _save(self, content: Content, release: Callable[[], None]) -> None:
        try:
            folder = await asyncio.to_thread(write_checkpoint, self._base, content, self._model_folder)
        except OSError as error:
            self._failed(content, error)
        else:
            await self._saved(content.version, folder)
        finally:
            release()
            self.task = None

    def _failed(self, content: Content, error: OSError) -> None:
        self._owed = True
        self.failures_in_a_row += 1
        self.last_error = (
            f"checkpoint of version {content.version} below {self._base}: {error.strerror or error}; it needs "
            f"{content.size_bytes} bytes{_free(self._base)}"
        )
        CHECKPOINT_FAILURES.inc()
        get_logger().error("checkpoint_failed", error=self.last_error, in_a_row=self.failures_in_a_row)

    async def _saved(self, version: PolicyVersion, folder: Path) -> None:
        self.failures_in_a_row, self.last_error = 0, ""
        if not self._on_line(version):
            # A rollback has taken the version off the line during the save: nobody may load it.
            await asyncio.to_thread(folders.delete_checkpoint, folder)
            return
        self._usable[version] = folders.read_manifest(folder)
        await self._record(version)
        CHECKPOINTS.inc()
        get_logger().info("checkpoint_saved", folder=str(folder), bytes=self._usable[version].size_bytes)
        for old in self._superfluous():
            await asyncio.to_thread(self.delete, old)

    def _superfluous(self) -> list[PolicyVersion]:
        """Unpinned checkpoints to delete: all but the newest `keep` on the line."""
        kept = [each for each in self.list() if not each.pinned and not each.fault]
        on_line = [each for each in kept if self._on_line(each.version)]
        return [each.version for each in kept if each not in on_line[-self._policy.keep :]]

    def list(self) -> list[Found]:
        return list(folders.find_checkpoints(self._base))

    def pin(self, version: PolicyVersion, pinned: bool) -> None:
        marker = self._existing(version) / folders.PINNED
        if pinned:
            marker.touch()
        else:
            marker.unlink(missing_ok=True)

    def delete(self, version: PolicyVersion) -> None:
        """Raises Precondition for a pinned one."""
        folder = self._existing(version)
        if (folder / folders.PINNED).exists():
            raise Precondition(f"checkpoint {version} is pinned; unpin it first")
        self._usable.pop(version, None)
        folders.delete_checkpoint(folder)

    def _existing(self, version: PolicyVersion) -> Path:
        folder = self.folder_of(version)
        if not folder.is_dir():
            known = ", ".join(str(each.version) for each in self.list()) or "none"
            raise NotFound(f"no checkpoint of version {version}; there are {known}")
        return folder

    def read_state(self, version: PolicyVersion, role: str, rank: int) -> tuple[bytes, int]:
        """A rank's state and its xxh3-64. A damaged one makes the checkpoint unusable and raises DataLoss."""
        folder, manifest = self.folder_of(version), self._usable.get(version)
        wanted = folders.state_file(role, rank)
        file = next((each for each in manifest.files if each.path == wanted), None) if manifest else None
        if manifest is None or file is None:
            raise NotFound(f"no state of {role} rank {rank} for version {version}, neither in memory nor on disk")
        try:
            state = (folder / wanted).read_bytes()
            if folders.hash_file(folder / wanted) != file.hash:
                raise DataLoss(f"checkpoint {folder}: the content of {wanted} is not what was saved")
        except (OSError, DataLoss) as error:
            del self._usable[version]
            get_logger().error("checkpoint_unusable", error=str(error))
            raise DataLoss(str(error)) from error
        return state, int(file.hash, 16)


def _free(folder: Path) -> str:
    try:
        return f", {shutil.disk_usage(folder).free} are free"
    except OSError:
        return ""  # the folder itself is missing
