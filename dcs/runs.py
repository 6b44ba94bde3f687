"""The runs of one state directory: opened whole or not at all, and one that is damaged harms no other."""

from __future__ import annotations

import asyncio
from pathlib import Path

from dcs.run_log import RunLog
from dcs.versions import Versions
from relax.dcs.v1 import dcs_pb2
from relax_common.errors import AlreadyExists, DataLoss, InvalidInput, UnknownRun, WaitsForDisk
from relax_common.names import check_name, check_path, folder_below
from relax_common.process.telemetry import get_logger
from relax_common.storage.framed_log import fsync_folder


class Runs:
    """`runs_root` is the folder below which a caller may name folders; None: anywhere."""

    def __init__(self, state_dir: Path, runs_root: Path | None = None) -> None:
        self._logs = state_dir / "runs"
        self._recovery = state_dir / "recovery"
        self._runs_root = runs_root
        self._opening = asyncio.Lock()
        self._runs: dict[str, Versions] = {}
        self._faults: dict[str, str] = {}
        for folder in (self._logs, self._recovery):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fsync_folder(state_dir)
        fsync_folder(state_dir.absolute().parent)
        for path in sorted(self._logs.glob("*.log")):
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            self._runs[path.stem] = Versions(RunLog(path), self._recovery / path.stem)
        except UnknownRun as error:
            get_logger().warning("run_never_opened", run=path.stem, error=error.message)
        except (DataLoss, OSError) as error:
            self._faults[path.stem] = str(error)
            get_logger().error("run_unreadable", run=path.stem, error=str(error))

    def get(self, name: str) -> Versions:
        run = self._runs.get(name)
        if run is not None:
            return run
        if name in self._faults:
            raise DataLoss(f"dcs cannot read the log of run {name!r}: {self._faults[name]}")
        raise UnknownRun(f"dcs has no run {name!r}")

    async def open(self, request: dcs_pb2.OpenRunRequest) -> None:
        """Idempotent for the same content. A request that is refused, or fails, leaves nothing behind."""
        check_name(request.run, "run")
        async with self._opening:
            known = self._runs.get(request.run)
            if known is None:
                self._runs[request.run] = await self._begin(request)
            elif known.spec != request:
                raise AlreadyExists(f"run {request.run} is open with other sizes")
            else:
                await known.log.sync()

    async def _begin(self, request: dcs_pb2.OpenRunRequest) -> Versions:
        if request.run in self._faults:
            raise DataLoss(f"dcs cannot read the log of run {request.run!r}: {self._faults[request.run]}")
        if not request.memory_budget_bytes or not request.snapshot_every or not request.snapshot_ranks:
            raise InvalidInput("OpenRun needs memory_budget_bytes, snapshot_every and snapshot_ranks")
        if request.checkpoint.every_steps:
            self._make_checkpoint_folder(request.checkpoint)
        path = self._logs / f"{request.run}.log"
        try:
            log = RunLog(path, request)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise WaitsForDisk(f"dcs cannot begin a log at {path}: {error.strerror}") from error
        try:
            await log.sync()
        except WaitsForDisk:
            log.discard()
            raise
        return Versions(log, self._recovery / request.run)

    def _make_checkpoint_folder(self, policy: dcs_pb2.CheckpointPolicy) -> None:
        folder = check_path(policy.folder, "checkpoint folder")
        check_path(policy.model_folder, "model folder")
        if self._runs_root is not None:
            folder = folder_below(self._runs_root, policy.folder, "checkpoint folder")
        if not folder.is_absolute():
            raise InvalidInput(f"checkpoint folder {folder} is not an absolute path")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(f"checkpoint folder {folder} cannot be made: {error.strerror}") from error

    async def load_weights(self) -> None:
        """Called after a restart, while the daemon already serves."""
        for run in list(self._runs.values()):
            await run.recovery.load_weights()

    async def broken(self) -> None:
        """Returns when the log of a run cannot be written any more."""
        while True:
            for run in self._runs.values():
                if run.log.broken.is_set():
                    return
            await asyncio.sleep(0.2)

    def disk_wait(self) -> str:
        """What a run waits for its disk for; empty if none waits."""
        waits = (run.log.disk_wait or run.recovery.disk_wait for run in self._runs.values())
        return next(filter(None, waits), "")
