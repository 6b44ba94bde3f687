"""Where a daemon's configuration comes from, and how a wrong one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from relax_common.process.config import DaemonConfig, load_daemon_config


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
