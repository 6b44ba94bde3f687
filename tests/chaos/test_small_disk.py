"""A run on a disk that is too small: it waits, says why, and goes on when there is room."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """The folder of runs is a disk of 14 MiB; the function that is yielded makes it larger."""
    folder = tmp_path / "runs"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=14m", "tmpfs", folder], check=True, timeout=30)
    yield lambda: subprocess.run(["mount", "-o", "remount,size=256m", folder], check=True, timeout=30) and None
    subprocess.run(["umount", "-l", folder], check=True, timeout=30)


def test_a_run_whose_disk_is_full_names_the_disk_and_goes_on_when_there_is_room(
    small_disk: Callable[[], None], start_run: Callable
) -> None:
    run = start_run("", "checkpoint.every_steps=2", "checkpoint.keep=100")

    reason = r"the queue waits [\d.]+ s for room: the disk below \S+ has \d+ bytes free, \d+ are needed"
    line = re.compile(rf"^running step \d/8 .*  \[{reason}", re.MULTILINE)
    run.wait_for("a line with the reason", lambda: line.search(run.output()))
    small_disk()
    run.finish()
