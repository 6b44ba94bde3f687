"""How every daemon starts or refuses to: environment, addresses, state directory. One line and a stable exit code."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from relax_common.process.config import EXIT_BAD_CONFIG
from relax_common.rpc.serving import EXIT_PORT_IN_USE

SECONDS = 90
DAEMONS = {
    "relaxd": "RELAXD",
    "relax_queue": "QUEUE",
    "dcs": "DCS",
    "trainer_server": "TRAINER",
    "rollout_server": "ROLLOUT",
}
IN_NO_RUN = ("relaxd", "relax_queue", "dcs")
"""The others register at relaxd before they lock a folder or open a port."""


def start(module: str, folder: Path, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, "--state-dir", str(folder / "state"), *flags]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


def assert_one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    told = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert len(told) == 1, done.stderr
    assert all(word in told[0] for word in words), told[0]


@pytest.mark.parametrize("module", DAEMONS)
def test_a_daemon_takes_its_keys_from_the_environment(module: str, tmp_path: Path) -> None:
    section = DAEMONS[module]
    variables = {f"RELAX_{section}__LOG_LEVEL": "warning", f"RELAX_{section}__INSTANCE": "me"}
    others = {f"RELAX_{each}__INSTANCE": "another" for each in DAEMONS.values() if each != section}
    done = start(module, tmp_path, "--print-config", "--controller", "127.0.0.1:1", **variables, **others)
    assert done.returncode == 0, done.stderr
    assert f"log_level = 'warning'  # RELAX_{section}__LOG_LEVEL" in done.stdout
    assert f"instance = 'me'  # RELAX_{section}__INSTANCE" in done.stdout


def test_slurm_tells_each_rank_of_the_actor_which_one_it_is(tmp_path: Path) -> None:
    """The names of deploy/slurm/relax.sbatch; with a doubled prefix each rank was rank 0 of 1."""
    done = start(
        "trainer_server",
        tmp_path,
        "--print-config",
        RELAX_TRAINER__WORLD_SIZE="2",
        RELAX_TRAINER__RANK="1",
        RELAX_TRAINER__INCARNATION="job.7",
        RELAX_TRAINER__STORE="127.0.0.1:20001",
    )
    assert done.returncode == 0, done.stderr
    for line in ("rank = '1'", "world_size = '2'", "incarnation = 'job.7'", "store = '127.0.0.1:20001'"):
        assert line in done.stdout


@pytest.mark.parametrize("module", DAEMONS)
@pytest.mark.parametrize(
    ("name", "words"),
    [("RELAX_{}__TYPO", "typo"), ("RELAX_RELAX_{}__INSTANCE", "is unknown"), ("RELAX_FAILPOINT", "RELAX_FAILPOINTS")],
)
def test_a_variable_that_nobody_reads_is_refused(module: str, name: str, words: str, tmp_path: Path) -> None:
    done = start(module, tmp_path, "--check-config", **{name.format(DAEMONS[module]): "1"})
    assert done.returncode == EXIT_BAD_CONFIG
    assert_one_line(done, words)


@pytest.mark.parametrize("module", DAEMONS)
def test_an_address_that_cannot_be_is_a_bad_configuration(module: str, tmp_path: Path) -> None:
    for flag, address in (("--listen", "127.0.0.1:99999"), ("--metrics-listen", "garbage")):
        done = start(module, tmp_path, flag, address)
        assert done.returncode == EXIT_BAD_CONFIG
        assert_one_line(done, flag.removeprefix("--").replace("-", "_"), "host:port")
    assert not (tmp_path / "state").exists(), "nothing was written"


@pytest.mark.parametrize("module", IN_NO_RUN)
def test_a_port_in_use_is_said_and_a_host_that_is_not_here_is_a_bad_configuration(module: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = start(module, tmp_path, "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert done.returncode == EXIT_PORT_IN_USE
    assert_one_line(done, "cannot listen on 127.0.0.1", "Address already in use")
    done = start(module, tmp_path, "--listen", "192.0.2.1:0", "--expose-plaintext", "true")
    assert done.returncode == EXIT_BAD_CONFIG
    assert_one_line(done, "cannot listen on 192.0.2.1")


@pytest.mark.parametrize("module", IN_NO_RUN)
def test_a_state_directory_in_use_or_out_of_reach_is_a_bad_configuration(module: str, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with (tmp_path / "state" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = start(module, tmp_path)
    assert done.returncode == EXIT_BAD_CONFIG
    assert_one_line(done, "state directory", "in use by another daemon")
    (tmp_path / "file").touch()
    done = start(module, tmp_path, "--state-dir", str(tmp_path / "file" / "below"))
    assert done.returncode == EXIT_BAD_CONFIG
    assert_one_line(done, "state directory", "Not a directory")
