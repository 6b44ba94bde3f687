"""What every daemon uses: configuration sources, errors over a wire, the framed log, failpoints, versions."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from relax.common.v1 import common_pb2
from relax_common.errors import DataLoss, PlanLost, Precondition, RelaxError, StaleTerm, to_status
from relax_common.process.config import DaemonConfig, load_daemon_config
from relax_common.process.host import keepable_port
from relax_common.rpc.registration import check_protocol, make_identity
from relax_common.rpc.serving import DESCRIPTORS, allow_descriptors
from relax_common.storage.framed_log import FramedLog
from relax_common.versions import PolicyVersion


class Config(DaemonConfig):
    """A daemon."""

    token: str = "secret"


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "garbage", "127.0.0.1:", "127.0.0.1:-1", "127.0.0.1:²"])
def test_an_address_without_a_possible_port_is_refused(address: str) -> None:
    for key in ("listen", "metrics_listen"):
        with pytest.raises(ValidationError, match="is not host:port"):
            DaemonConfig.model_validate({key: address})


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.toml"
    file.write_text('instance = "file"\nlog_level = "debug"\nmetrics_listen = "127.0.0.2:1"\n')
    monkeypatch.setenv("RELAX_X__INSTANCE", "environment")
    monkeypatch.setenv("RELAX_X__LOG_LEVEL", "error")
    config = load_daemon_config(Config, "relax-x", ["--config", str(file), "--instance", "flag"])
    assert (config.instance, config.log_level, config.metrics_listen) == ("flag", "error", "127.0.0.2:1")
    assert config.listen == "127.0.0.1:0"


@pytest.mark.parametrize(
    ("toml", "argv", "words"),
    [
        ('instanse = "x"', [], "unknown key 'instanse': did you mean 'instance'?"),
        ('log_level = "loud"', [], "log_level = 'loud'"),
        ("instance = ", [], "Invalid value"),
        ("", ["--log-level", "loud"], "(from --log-level)"),
    ],
)
def test_a_wrong_configuration_ends_with_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], toml: str, argv: list[str], words: str
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(toml)
    with pytest.raises(SystemExit) as caught:
        load_daemon_config(Config, "relax-x", ["--config", str(file), *argv])
    assert caught.value.code == 2
    line = capsys.readouterr().err.strip()
    assert words in line
    assert "\n" not in line


def test_print_config_names_sources_and_hides_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_daemon_config(Config, "relax-x", ["--instance", "a", "--token", "hush", "--print-config"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "instance = 'a'  # --instance" in out
    assert "log_level = 'info'  # default" in out
    assert "hush" not in out


def test_a_daemon_may_have_as_many_descriptors_as_the_hard_limit_allows() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        allow_descriptors()
        found = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == DESCRIPTORS or found == limits[1] < DESCRIPTORS


def test_an_error_carries_reason_and_details_in_its_status() -> None:
    status = to_status(PlanLost("step 3 is lost", details={"step": "3"}))
    assert (status.code, status.message) == (9, "step 3 is lost")
    assert b"PLAN_LOST" in status.details[0].value
    assert StaleTerm("x").reason == "STALE_TERM"
    assert RelaxError("x").reason == "INTERNAL"


def test_a_peer_of_another_protocol_is_refused_by_name() -> None:
    peer = make_identity(common_pb2.ROLE_QUEUE, "queue")
    check_protocol(peer)
    peer.protocol_version += 1
    with pytest.raises(Precondition, match="install the same release on both"):
        check_protocol(peer)


@given(st.integers(0, 2**20), st.integers(0, 2**32 - 1))
def test_versions_survive_packing_and_order_by_lineage(lineage: int, number: int) -> None:
    version = PolicyVersion(lineage, number)
    assert PolicyVersion.unpack(version.pack()) == version
    assert PolicyVersion(lineage + 1, 0) > version


@given(st.lists(st.binary(max_size=200), max_size=8), st.sampled_from([0, 300]), st.data())
def test_a_log_gives_back_every_whole_frame_wherever_it_was_cut(
    frames: list[bytes], ahead: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        log = FramedLog(path, ahead)
        assert list(log.replay()) == []
        ends = [0]
        for frame in frames:
            log.append(frame)
            ends.append(log.end)
        asyncio.run(log.sync())
        content = path.read_bytes()
        log.close()
        assert path.stat().st_size == ends[-1], "zeros ahead are cut off"
        cut = data.draw(st.integers(0, ends[-1]))
        torn = content[:cut] + bytes(len(content) - cut if ahead else 0)
        path.write_bytes(torn)
        whole = max(i for i, end in enumerate(ends) if torn[:end] == content[:end])
        again = FramedLog(path, ahead)
        assert list(again.replay()) == frames[:whole]
        again.append(b"next")
        again.close()
        final = FramedLog(path)
        assert list(final.replay()) == [*frames[:whole], b"next"]
        final.close()


def test_a_damaged_frame_with_good_ones_after_it_is_never_cut_off(tmp_path: Path) -> None:
    log = FramedLog(tmp_path / "log")
    list(log.replay())
    log.append(b"one", b"two", b"three")
    log.close()
    raw = bytearray((tmp_path / "log").read_bytes())
    raw[raw.index(b"two")] ^= 1
    (tmp_path / "log").write_bytes(raw)
    again = FramedLog(tmp_path / "log")
    with pytest.raises(DataLoss, match="the frame at byte 11 is damaged and good ones follow"):
        list(again.replay())
    again.close()
    assert (tmp_path / "log").read_bytes() == raw


def failing(points: str, folder: Path, code: str) -> int:
    env = {**os.environ, "RELAX_FAILPOINTS": points, "RELAX_FAILPOINTS_DIR": str(folder)}
    program = f"from relax_common.failpoints import failpoint\n{code}"
    return subprocess.run([sys.executable, "-c", program], env=env, timeout=30, capture_output=True).returncode


def test_a_failpoint_kills_at_its_hit_once_per_run(tmp_path: Path) -> None:
    code = "for i in range(3): failpoint('a.b')"
    assert failing("a.b=kill@4", tmp_path, code) == 0
    assert failing("a.b=kill@3", tmp_path, code) == -signal.SIGKILL
    assert failing("a.b=kill@3", tmp_path, code) == 0
    assert failing("a.b=explode", tmp_path, code) == 1


def test_a_port_that_is_kept_lies_where_no_outgoing_connection_takes_it() -> None:
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {keepable_port() for _ in range(20)}
    assert all(10_000 <= port < first_outgoing for port in ports)
    assert len(ports) > 10
