"""What integration and chaos tests share: real daemons as subprocesses on free ports, stopped by process id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings

from relax_common.process.host import keepable_port

START_SECONDS = 60.0
# Generous, because a busy machine is not a fault of the code under test.
settings.register_profile("relax", deadline=None)
settings.load_profile("relax")
REPOSITORY = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    """Daemons under test and their callers share a token of their own, never the user's."""
    folder = tempfile.TemporaryDirectory(prefix="relax-token-")
    config.add_cleanup(folder.cleanup)
    os.environ["RELAX_TOKEN_FILE"] = str(Path(folder.name) / "token")


@dataclass
class RunningDaemon:
    """A daemon under test; `restart` starts it again on the same port and state."""

    module: str
    args: tuple[str, ...]
    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    address: str = ""
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def start(self) -> RunningDaemon:
        address_file = self.folder / "address"
        address_file.unlink(missing_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", self.module, "--listen", self.address or f"127.0.0.1:{keepable_port()}"),
                    *("--state-dir", str(self.folder / "state"), "--address-file", str(address_file)),
                    *self.args,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.env},
            )
        end = time.monotonic() + START_SECONDS
        while not address_file.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"{self.module} did not start: {self.log}")
            time.sleep(0.02)
        self.address = address_file.read_text().strip()
        return self

    def kill(self) -> None:
        """kill -9"""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(40)

    def restart(self, **env: str) -> None:
        self.env = {**self.env, **env}
        self.start()


StartDaemon = Callable[..., RunningDaemon]


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[StartDaemon]:
    """start_daemon("dcs", *args, name=..., **env) -> RunningDaemon"""
    started: list[RunningDaemon] = []

    def start(module: str, *args: str, name: str = "", **env: str) -> RunningDaemon:
        folder = tmp_path / (name or module)
        folder.mkdir()
        daemon = RunningDaemon(module, args, folder, dict(env))
        started.append(daemon)
        return daemon.start()

    yield start
    for daemon in started:
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.process.kill()
            daemon.process.wait(10)


@pytest.fixture(scope="session")
def quickstart_material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with quickstart.toml and the model it names."""
    folder = tmp_path_factory.mktemp("material")
    subprocess.run(
        [sys.executable, str(REPOSITORY / "recipes/quickstart/make_model.py"), str(folder / "quickstart/made")],
        check=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    (folder / "quickstart.toml").write_text((REPOSITORY / "recipes/quickstart.toml").read_text())
    return folder
