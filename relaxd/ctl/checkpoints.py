"""`relaxctl checkpoint`: what lies below a run's directory. Needs no daemon; dcs looks at the same folders."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from relax_common.errors import InvalidInput, NotFound, Precondition
from relax_common.storage.checkpoint_folder import PINNED, Found, delete_checkpoint, find_checkpoints
from relaxd.ctl.files import find_run


def run(args: argparse.Namespace) -> int:
    folder = find_run(args.runs_dir, args.run) / "checkpoints"
    if args.action == "list":
        return show(folder)
    if not args.version:
        raise InvalidInput(f"name the checkpoint to {args.action}: relaxctl checkpoint {args.action} {args.run} 0.41")
    found = _one(folder, args.version)
    if args.action == "delete":
        _delete(folder, found)
    elif args.action == "pin":
        (found.folder / PINNED).touch()
    else:
        (found.folder / PINNED).unlink(missing_ok=True)
    return show(folder)


def show(folder: Path) -> int:
    table = Table("version", "step", "size", "saved", "", title=str(folder))
    for found in find_checkpoints(folder):
        remark = "pinned" if found.pinned else ""
        if found.manifest is None:
            table.add_row(str(found.version), "", "", "", f"[red]{found.fault}[/red]")
            continue
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.manifest.saved_unix_seconds))
        size = f"{found.manifest.size_bytes / 1e6:,.1f} MB"
        table.add_row(str(found.version), str(found.manifest.step), size, saved, remark)
    Console().print(table)
    return 0


def _one(folder: Path, version: str) -> Found:
    every = list(find_checkpoints(folder))
    for found in every:
        if str(found.version) == version:
            return found
    raise NotFound(f"no checkpoint {version} below {folder}; there are {', '.join(str(f.version) for f in every)}")


def _delete(folder: Path, found: Found) -> None:
    if found.pinned:
        raise Precondition(f"checkpoint {found.version} is pinned; unpin it first")
    if not any(each.manifest for each in find_checkpoints(folder) if each.version != found.version):
        raise Precondition(f"checkpoint {found.version} is the only one that can be loaded; it stays")
    delete_checkpoint(found.folder)
