"""`relaxctl checkpoint`: the checkpoints below a run's directory. Needs no daemon; dcs uses the same folders."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from relax_common.errors import InvalidInput, NotFound, Precondition
from relax_common.storage.checkpoint_folder import PINNED, Found, delete_checkpoint, find_checkpoints
from relaxd.ctl.files import find_run
from relaxd.ctl.output import Format, print_table


def run(args: argparse.Namespace) -> int:
    folder = find_run(args.runs_dir, args.run) / "checkpoints"
    if args.action == "list":
        return show(folder, args.output)
    if not args.version:
        raise InvalidInput(f"name the checkpoint to {args.action}: relaxctl checkpoint {args.action} {args.run} 0.41")
    found = _one(folder, args.version)
    if args.action == "delete":
        _delete(folder, found)
    elif args.action == "pin":
        (found.folder / PINNED).touch()
    else:
        (found.folder / PINNED).unlink(missing_ok=True)
    return show(folder, args.output)


def show(folder: Path, output: Format) -> int:
    rows = []
    for found in find_checkpoints(folder):
        step, size, saved = "", "", ""
        if found.manifest is not None:
            step = str(found.manifest.step)
            size = str(found.manifest.size_bytes)
            saved = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(found.manifest.saved_unix_seconds))
        remark = "pinned" if found.pinned else found.fault
        rows.append((str(found.version), step, size, saved, remark))
    print_table(output, ("version", "step", "bytes", "saved", "remark"), rows)
    return 0


def _one(folder: Path, version: str) -> Found:
    every = list(find_checkpoints(folder))
    for found in every:
        if str(found.version) == version:
            return found
    known = ", ".join(str(found.version) for found in every) or "none"
    raise NotFound(f"no checkpoint {version} below {folder}; there are: {known}")


def _delete(folder: Path, found: Found) -> None:
    if found.pinned:
        raise Precondition(f"checkpoint {found.version} is pinned; unpin it first")
    if not any(each.manifest for each in find_checkpoints(folder) if each.version != found.version):
        raise Precondition(f"checkpoint {found.version} is the only one that can be loaded; it stays")
    delete_checkpoint(found.folder)
