"""The shared token of an installation: with it a caller may call every daemon, without it none.

It is in a file that only its owner can read, `RELAX_TOKEN_FILE` or by default `~/.config/relax/token`; the first
process that needs the file creates it. All hosts of a cluster must read the same file, or copies of it.
"""

from __future__ import annotations

import functools
import hmac
import os
import secrets
import stat
from pathlib import Path

from relax_common.errors import InvalidInput

VARIABLE = "RELAX_TOKEN_FILE"
HEADER = "authorization"
_TOKEN_BYTES = 32
_LENGTH_MIN = 16
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def token_file() -> Path:
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "relax" / "token"


def bearer() -> str:
    """Value of the `authorization` header. Raises InvalidInput if the file cannot serve as a secret."""
    return f"Bearer {_token(token_file())}"


def call_metadata() -> tuple[tuple[str, str], ...]:
    """The metadata that every call of this process carries."""
    return ((HEADER, bearer()),)


def is_bearer(value: str | bytes | None, expected: str) -> bool:
    """Compares in constant time."""
    given = value if isinstance(value, bytes) else (value or "").encode()
    return hmac.compare_digest(given, expected.encode())


@functools.cache
def _token(path: Path) -> str:
    try:
        if not path.exists():
            _make(path)
        status = path.stat()
        text = path.read_text().strip()
    except OSError as error:
        raise InvalidInput(
            f"token file {path}: {error.strerror}; set {VARIABLE} to a file that this user owns"
        ) from error
    if status.st_mode & _OTHERS:
        raise InvalidInput(f"token file {path} can be read by other users: chmod 600 it, and replace the token")
    if len(text) < _LENGTH_MIN or not text.isascii() or not text.isprintable():
        raise InvalidInput(f"token file {path} must hold one line of at least {_LENGTH_MIN} printable ASCII characters")
    return text


def _make(path: Path) -> None:
    """Two processes may create it at the same moment: the one that links second uses the other's token."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(_TOKEN_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
