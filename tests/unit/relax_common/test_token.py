"""The token of an installation: one file, one owner, one value for everybody."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from pydantic import ValidationError

from relax_common.errors import InvalidInput
from relax_common.process.config import DaemonConfig, is_loopback
from relax_common.rpc import token


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "config" / "relax" / "token"
    monkeypatch.setenv(token.VARIABLE, str(file))
    return file


def test_the_first_who_needs_it_makes_a_file_for_its_owner_alone(path: Path) -> None:
    shown = token.bearer()
    assert shown == f"Bearer {path.read_text().strip()}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [each.name for each in path.parent.iterdir()] == ["token"]


def test_many_who_are_first_agree_on_one_token(path: Path) -> None:
    together = Barrier(16)

    def first(_: int) -> str:
        together.wait(30)
        token._make(path)
        return path.read_text()

    with ThreadPoolExecutor(16) as pool:
        seen = set(pool.map(first, range(16)))
    assert seen == {path.read_text()}, "nobody has used a token that another has replaced"
    assert [each.name for each in path.parent.iterdir()] == ["token"]


def test_a_file_that_others_can_read_is_no_secret(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("x" * 32)
    path.chmod(0o640)
    with pytest.raises(InvalidInput, match="can be read by other users"):
        token.bearer()


@pytest.mark.parametrize("content", ["", "short", "x" * 31 + "\u00e9", "two lines\nof a token here"])
def test_a_file_without_a_token_is_refused(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True)
    path.touch(0o600)
    path.write_text(content)
    with pytest.raises(InvalidInput, match="must hold one line"):
        token.bearer()


def test_a_folder_in_its_place_is_named(path: Path) -> None:
    path.mkdir(parents=True, mode=0o700)
    with pytest.raises(InvalidInput, match=f"token file {path}: Is a directory"):
        token.bearer()


@pytest.mark.parametrize(
    ("shown", "fits"),
    [("Bearer secret", True), (b"Bearer secret", True), ("Bearer secre", False), ("secret", False), (None, False)],
)
def test_only_the_exact_value_opens(shown: str | bytes | None, fits: bool) -> None:
    assert token.is_bearer(shown, "Bearer secret") is fits


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.8.9.1:5", "[::1]:7", "localhost:1", "unix:/run/x"])
def test_loopback_listeners_need_no_word(address: str) -> None:
    assert is_loopback(address)
    assert DaemonConfig(listen=address).listen == address


@pytest.mark.parametrize("address", ["0.0.0.0:7777", "[::]:1", "10.0.0.1:1", "host.example:1", ":7"])
@pytest.mark.parametrize("key", ["listen", "metrics_listen"])
def test_other_listeners_need_the_configuration_to_say_so(address: str, key: str) -> None:
    assert not is_loopback(address)
    with pytest.raises(ValidationError, match=f"{key} = .*expose_plaintext"):
        DaemonConfig.model_validate({key: address})
    assert DaemonConfig.model_validate({key: address, "expose_plaintext": True}).expose_plaintext
