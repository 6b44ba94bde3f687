"""Checks names and folders that came from outside before anything is written under them."""

from __future__ import annotations

import re
from pathlib import Path

from relax_common.errors import InvalidInput

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(name: str, what: str) -> str:
    """Returns the name if it is allowed in file names, addresses and labels. Raises InvalidInput, which names
    `what`."""
    if not _NAME.fullmatch(name):
        shown = name if len(name) <= 60 else name[:57] + "..."
        raise InvalidInput(
            f"{what} {shown!r} is not a name: it has 1 to 128 letters, digits, '.', '_' and '-', and begins with a "
            "letter or digit"
        )
    return name


def check_path(given: str | Path, what: str) -> Path:
    """The path; raises InvalidInput, which names `what`, for one that no file system takes."""
    if "\0" in str(given):
        raise InvalidInput(f"{what} {str(given)!r} has a zero byte, which no path may have")
    return Path(given)


def folder_below(root: Path, given: str | Path, what: str) -> Path:
    """`given` as an absolute path strictly below `root`, links followed. Raises InvalidInput, which names `what`."""
    resolved_root, folder = root.resolve(), check_path(given, what)
    folder = (folder if folder.is_absolute() else resolved_root / folder).resolve()
    if resolved_root not in folder.parents:
        raise InvalidInput(f"{what} {given} does not lie below {resolved_root}, where this daemon may write")
    return folder
