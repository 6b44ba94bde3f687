"""How a daemon is configured: flag > RELAX_SERVICE__KEY > file > default, each value with its source.

SERVICE is relaxd, queue, dcs, trainer or rollout: `RELAX_TRAINER__RANK=1` is the same as `relax-trainer --rank 1`.
"""

from __future__ import annotations

import argparse
import difflib
import ipaddress
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from relax_common.errors import InvalidInput
from relax_common.errors.validation import one_line
from relax_common.json_types import JsonObject

EXIT_BAD_CONFIG = 2
PORT_MAX = 65535
SERVICES = ("RELAXD", "QUEUE", "DCS", "TRAINER", "ROLLOUT")
KNOWN_VARIABLES = frozenset(
    {
        "RELAX_BIN",
        "RELAX_CONTROLLER",
        "RELAX_CONTROLLER_ADDRESS",
        "RELAX_EVENT_LOOP",
        "RELAX_FAILPOINTS",
        "RELAX_FAILPOINTS_DIR",
        "RELAX_SGLANG_PYTHON",
        "RELAX_TOKEN_FILE",
    }
)
"""Variables that are not part of a daemon's configuration: deployment files, relaxctl, tests and the event loop read
them."""


class DaemonConfig(BaseModel):
    """Options of every daemon. Subclasses add their own keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: str = "127.0.0.1:0"
    """host:port of the gRPC server; port 0 takes a free one."""
    metrics_listen: str = "127.0.0.1:0"
    """host:port of the Prometheus endpoint."""
    expose_plaintext: bool = False
    """Allow listeners that other hosts can reach, although nothing is encrypted: a reader of that network's traffic
    can take the token, and with the token run programs as this user."""
    state_dir: Path = Path("state")
    """Folder for everything durable."""
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$")
    instance: str = ""
    """Name of this daemon, stable over restarts; default: its service name."""
    incarnation: str = ""
    """Chosen by the launcher where several processes form one incarnation of a role; default: random."""
    controller: str = ""
    """host:port of relaxd; empty: the daemon runs alone and registers nowhere."""
    address_file: Path | None = None
    """The bound host:port is written here (atomically) once the daemon serves."""

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _is_an_address(cls, address: str) -> str:
        if address.startswith("unix:"):
            return address
        port = address.rpartition(":")[2]
        if not (port.isascii() and port.isdigit()) or int(port) > PORT_MAX:
            raise ValueError(f"{address!r} is not host:port with a port from 0 to {PORT_MAX}")
        return address

    @model_validator(mode="after")
    def _says_aloud_who_may_connect(self) -> Self:
        for key in ("listen", "metrics_listen"):
            address = getattr(self, key)
            if not self.expose_plaintext and not is_loopback(address):
                raise ValueError(
                    f"{key} = {address!r} lets other hosts connect, and nothing is encrypted: listen on 127.0.0.1, or "
                    "set expose_plaintext = true where only trusted hosts reach this network"
                )
        return self


def is_loopback(address: str) -> bool:
    """Whether only processes of this host reach the address."""
    host = address.rpartition(":")[0].strip("[]")
    if address.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


C = TypeVar("C", bound=DaemonConfig)


def load_daemon_config(cls: type[C], service: str, argv: Sequence[str] | None = None) -> C:
    """Parse flags, environment and file; prints and exits on --check-config, --print-config and errors."""
    parser = argparse.ArgumentParser(prog=service, description=cls.__doc__)
    parser.add_argument("--config", type=Path, help="TOML file")
    parser.add_argument("--check-config", action="store_true", help="validate and exit")
    parser.add_argument("--print-config", action="store_true", help="print each value with its source and exit")
    for name, field in cls.model_fields.items():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=f"key_{name}", metavar=str(field.default) or "TEXT")
    args = parser.parse_args(argv)
    try:
        values, sources = _merge(cls, service, args)
        config = cls.model_validate(values)
    except ValidationError as error:
        _fail(service, one_line(error, cls, sources))
    except (InvalidInput, OSError, tomllib.TOMLDecodeError) as error:
        _fail(service, str(error))
    if args.print_config:
        for name in cls.model_fields:
            shown = "***" if "token" in name or "secret" in name else getattr(config, name)
            print(f"{name} = {str(shown)!r}  # {sources.get(name, 'default')}")
    if args.print_config or args.check_config:
        sys.exit(0)
    return config


def _merge(cls: type[DaemonConfig], service: str, args: argparse.Namespace) -> tuple[JsonObject, dict[str, str]]:
    values: JsonObject = {}
    sources: dict[str, str] = {}
    if args.config is not None:
        for key, value in tomllib.loads(args.config.read_text()).items():
            values[key], sources[key] = value, str(args.config)
    for key, value, name in _environment(service, os.environ):
        values[key], sources[key] = value, name
    for key in cls.model_fields:
        flag = getattr(args, f"key_{key}")
        if flag is not None:
            values[key], sources[key] = flag, f"--{key.replace('_', '-')}"
    return values, sources


def _environment(service: str, environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(key, value, variable) of this daemon. A name that nobody reads is an error, most likely a typing mistake."""
    own = service.removeprefix("relax-").replace("-", "_").upper()
    found = []
    for name, value in sorted(environ.items()):
        if not name.startswith("RELAX_") or name in KNOWN_VARIABLES:
            continue
        section, separator, key = name.removeprefix("RELAX_").partition("__")
        if not separator or section not in {own, *SERVICES}:
            near = difflib.get_close_matches(
                name, [*KNOWN_VARIABLES, *(f"RELAX_{each}__{key}" for each in SERVICES)], n=1
            )
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(KNOWN_VARIABLES))}"
            raise InvalidInput(f"environment variable {name} is unknown, a daemon's key is RELAX_SERVICE__KEY: {hint}")
        if section == own:
            found.append((key.lower(), value, name))
    return found


def _fail(service: str, message: str) -> NoReturn:
    print(f"{service}: {message}", file=sys.stderr)
    sys.exit(EXIT_BAD_CONFIG)
