"""A log that cannot be written does not end its process."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from relax_common.process.telemetry import configure_logging, get_logger


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_below_the_log_loses_the_line_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("info", "test", "")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", FullDisk())
        get_logger().info("lost")
    get_logger().info("heard")
    told = capsys.readouterr().err
    assert '"event": "heard"' in told
    assert "lost" not in told
