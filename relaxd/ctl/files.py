"""Commands that read a run directory; they work without any daemon."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

from relax_common.errors import AlreadyExists, Exhausted, InvalidInput, NotFound
from relax_common.recipe import load_recipe
from relax_common.storage.checkpoint_folder import WEIGHTS, check_hashes, read_manifest, version_of
from relaxd.ctl.output import Format, print_columns, print_json
from relaxd.run.files import read_lines
from relaxd.run.ledger import audit


def find_run(runs_dir: Path, run: str) -> Path:
    """A run directory by path or by name; 'latest' is the newest."""
    candidates = sorted(path.parent for path in runs_dir.glob("*/recipe.toml"))
    if run == "latest" and candidates:
        return max(candidates, key=lambda path: path.stat().st_mtime)
    for folder in (Path(run), runs_dir / run):
        if (folder / "recipe.toml").is_file():
            return folder
    names = ", ".join(path.name for path in candidates[-5:]) or "none"
    raise NotFound(f"no run {run!r} below {runs_dir}; newest: {names}")


def show_ledger(runs_dir: Path, run: str, output: Format) -> int:
    """Exit code 1 if I1 does not hold."""
    folder = find_run(runs_dir, run)
    events = list(read_lines(folder / "events.jsonl"))
    ended = any(event["kind"] == "run_state" and event.get("state") == "ended" for event in events)
    recipe = load_recipe(folder / "recipe.toml")
    result = audit(events, ended=ended, max_staleness=recipe.max_staleness)
    if output == "json":
        print_json({"run": folder.name, "ended": ended, "events": len(events), **asdict(result)})
        return 1 if result.faults else 0
    print(f"{folder.name}: {'ended' if ended else 'in progress'}, {len(events)} events")
    rows: list[tuple[str, object]] = sorted(result.counts.items())
    rows += [(f"  dropped: {reason}", count) for reason, count in sorted(result.dropped_by_reason.items())]
    rows += [("commits", result.commits), ("max staleness", f"{result.max_staleness} (bound {recipe.max_staleness})")]
    print_columns(("groups", "count"), rows)
    for fault in result.faults:
        print(f"fault: {fault}")
    print("no fault" if not result.faults else f"{len(result.faults)} faults")
    return 1 if result.faults else 0


def show_logs(runs_dir: Path, run: str, daemon: str, lines: int) -> int:
    folder = find_run(runs_dir, run) / "logs"
    paths = sorted(folder.glob(f"{daemon or '*'}.log"))
    if not paths:
        known = ", ".join(path.stem for path in sorted(folder.glob("*.log")))
        raise NotFound(f"no log of {daemon!r}; there are {known or 'none'}")
    for path in paths:
        print(f"== {path.stem}")
        for line in path.read_text(errors="replace").splitlines()[-lines:] if lines else ():
            print(line)
    return 0


def export(runs_dir: Path, source: str, out: Path) -> int:
    """Write the weights of a checkpoint, every byte verified, or the export of an ended run. Needs no daemon."""
    if out.exists():
        raise AlreadyExists(f"{out} exists; choose a new folder")
    checkpoint = Path(source)
    if version_of(checkpoint.resolve().name) is not None:
        manifest = read_manifest(checkpoint)
        check_hashes(checkpoint, manifest)
        _copy(checkpoint / WEIGHTS, out)
        print(f"{out}: weights of version {manifest.version}, after {manifest.step + 1} steps")
        return 0
    folder = find_run(runs_dir, source)
    if not (folder / "export" / "config.json").is_file():
        raise InvalidInput(f"run {folder.name} has no export: it has not ended (see `relaxctl status`)")
    _copy(folder / "export", out)
    steps = json.loads((folder / "summary.json").read_text())["steps"]
    print(f"{out}: weights after {steps} steps")
    return 0


def _copy(source: Path, out: Path) -> None:
    temporary = out.with_name(out.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        shutil.copytree(source, temporary)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise Exhausted(f"{out}: {error}") from error
    temporary.rename(out)
