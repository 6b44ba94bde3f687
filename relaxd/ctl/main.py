"""`relaxctl`: start a run and watch it; see what is running, who waits for what, and whether anything was lost."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from relax_common.errors import RelaxError
from relax_common.process.telemetry import configure_logging

_RUN = "a run's name, or 'latest'"


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    configure_logging("error", "relaxctl", "")
    # SIGTERM ends what was started, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Each command imports what it needs: `relaxctl --help` must not wait for plots or channels.
    try:
        sys.exit(_run(args))
    except RelaxError as error:
        print(f"relaxctl: {error.message}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        # In `relaxctl status | head` the reader has closed the pipe; the interpreter must not flush into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)


def _run(args: argparse.Namespace) -> int:
    if args.command == "run":
        if args.dry_run:
            from relaxd.ctl.dry_run import dry_run

            return dry_run(args.recipe, args.set, as_json_text=args.json)
        from relaxd.ctl.run import run_recipe

        return run_recipe(args.recipe, args.set, runs_dir=args.runs_dir)
    if args.command == "resume":
        from relaxd.ctl.files import find_run
        from relaxd.ctl.run import resume

        return resume(find_run(args.runs_dir, args.run), accept_changed_data=args.accept_changed_data)
    if args.command == "checkpoint":
        from relaxd.ctl import checkpoints

        return checkpoints.run(args)
    if args.command in ("ledger", "logs", "export"):
        from relaxd.ctl import files

        if args.command == "ledger":
            return files.show_ledger(args.runs_dir, args.run, args.output)
        if args.command == "logs":
            return files.show_logs(args.runs_dir, args.run, args.daemon, args.lines)
        return files.export(args.runs_dir, args.source, args.out)
    from relaxd.ctl import views

    if args.command == "queue":
        return _ask_queue(args)
    address = views.controller_address(args.controller, args.runs_dir)
    if args.command == "stop":
        return views.stop(address, args.run)
    if args.command == "create":
        return views.create(address, args.recipe, args.set, args.run_dir)
    if args.command == "watch":
        return views.watch(address, args.run)
    show = {"status": views.show_status, "daemons": views.show_daemons, "runs": views.show_runs}[args.command]
    return show(address, args.output)


def _ask_queue(args: argparse.Namespace) -> int:
    from relaxd.ctl import queue, views

    run = args.run
    if not args.queue or run == "latest":
        controller = views.controller_address(args.controller, args.runs_dir)
        run = views.resolve_run(controller, run)
    view = queue.QueueView(args.queue or queue.queue_address(controller))
    if args.question == "inspect":
        return view.inspect(run, args.group, args.output)
    if args.question == "watch":
        return view.watch(run, args.after, args.output)
    return view.status(run, args.output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="relaxctl", description=__doc__)
    parser.add_argument("--controller", default="", help="host:port of relaxd (default: that of the newest run)")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="folder of run directories")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="start everything a recipe needs on this host and watch it")
    run.add_argument("recipe", type=Path)
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the recipe")
    run.add_argument("--dry-run", action="store_true", help="check the recipe, print who runs where in how many bytes")
    run.add_argument("--json", action="store_true", help="with --dry-run: the plan for programs")
    _add_output(commands.add_parser("status", help="the run in progress, and who waits for what"))
    _add_output(commands.add_parser("daemons", help="relaxd and all registered daemons, with their addresses"))
    _add_output(commands.add_parser("runs", help="runs of the controller"))
    ledger = commands.add_parser("ledger", help="check from a run's events that no group was lost or trained twice")
    _add_output(ledger)
    ledger.add_argument("run", help=_RUN)
    logs = commands.add_parser("logs", help="last lines of a daemon's log")
    logs.add_argument("run", help=_RUN)
    logs.add_argument("daemon", nargs="?", default="", help="for example actor-0; default: all")
    logs.add_argument("--lines", type=_count, default=20, help="how many last lines of each log; 0: only list the logs")
    stop = commands.add_parser("stop", help="end a run after the step in flight")
    stop.add_argument("run", help=_RUN)
    create = commands.add_parser("create", help="create a run on a relaxd that starts no daemons (--launcher none)")
    create.add_argument("recipe", type=Path)
    create.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the recipe")
    create.add_argument("--run-dir", type=Path, default=None, help="default: below the controller's state directory")
    watch = commands.add_parser("watch", help="show a run's progress until it has ended")
    watch.add_argument("run", help=_RUN)
    resume = commands.add_parser("resume", help="continue a stopped, failed or lost run from its state on disk")
    resume.add_argument("run", help=_RUN)
    resume.add_argument(
        "--accept-changed-data", action="store_true", help="continue although the rows of the data have changed"
    )
    export = commands.add_parser("export", help="copy the Hugging Face folder of a checkpoint or of an ended run")
    export.add_argument("source", help="a checkpoint's folder, or a run")
    export.add_argument("out", type=Path)
    checkpoint = commands.add_parser("checkpoint", help="list a run's checkpoints; pin, unpin or delete one")
    _add_output(checkpoint)
    checkpoint.add_argument("action", choices=("list", "pin", "unpin", "delete"))
    checkpoint.add_argument("run", help=_RUN)
    checkpoint.add_argument("version", nargs="?", default="", help="lineage.number, as list shows it")
    _add_queue(commands.add_parser("queue", help="what the sample bus holds, and what happens there"))
    return parser


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a count")
    return int(text)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="json is for programs")


def _add_queue(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--queue", default="", help="host:port of the queue (default: the one that relaxd knows)")
    questions = parser.add_subparsers(dest="question", required=True)
    status = questions.add_parser("status", help="groups by state, bytes, leases, kept steps, who waits for what")
    status.add_argument("run", nargs="?", default="", help="default: all runs")
    _add_output(status)
    inspect = questions.add_parser("inspect", help="state, rows and fields of one group")
    inspect.add_argument("run", help=_RUN)
    inspect.add_argument("group")
    _add_output(inspect)
    watch = questions.add_parser("watch", help="events as they happen, until the run has ended")
    watch.add_argument("run", help=_RUN)
    watch.add_argument("--after", type=_count, default=0, metavar="REVISION", help="only events after this revision")
    _add_output(watch)


if __name__ == "__main__":
    main()
