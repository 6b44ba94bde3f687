"""Commands that ask a controller."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import grpc
from rich.console import Console

from relax.common.v1 import common_pb2
from relax.controller.v1 import controller_pb2, controller_pb2_grpc
from relax_common.errors import DeadlineExceeded, NotFound, Unavailable, from_rpc
from relax_common.recipe import load_recipe, to_toml
from relax_common.rpc.channels import call_with_retry, sync_channel
from relaxd.ctl.output import Format, print_columns, print_json, print_table
from relaxd.ctl.progress import Progress, numbers

ADDRESS_FILE = "relaxd.address"
CALL_SECONDS = 5.0
CREATE_SECONDS = 60.0
WATCH_SECONDS = 24 * 3600.0
FINAL = (controller_pb2.RUN_STATE_ENDED, controller_pb2.RUN_STATE_FAILED, controller_pb2.RUN_STATE_STOPPED)


def controller_address(given: str, runs_dir: Path) -> str:
    """The controller's address: --controller, else RELAX_CONTROLLER, else that of the newest run directory."""
    if given or os.environ.get("RELAX_CONTROLLER"):
        return given or os.environ["RELAX_CONTROLLER"]
    files = sorted(runs_dir.glob(f"*/{ADDRESS_FILE}"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise NotFound(
            f"no run is in progress below {runs_dir} (`relaxctl ledger latest` reads an ended one); "
            "name another controller with --controller host:port"
        )
    return files[-1].read_text().strip()


def connect(address: str) -> controller_pb2_grpc.ControllerServiceStub:
    return controller_pb2_grpc.ControllerServiceStub(sync_channel(address))


def list_runs(address: str) -> list[controller_pb2.Run]:
    stub = connect(address)
    response = call_with_retry(
        lambda s: stub.ListRuns(controller_pb2.ListRunsRequest(), timeout=s),
        what=f"relaxd at {address}",
        deadline_seconds=CALL_SECONDS,
    )
    return list(response.runs)


def state_name(run: controller_pb2.Run) -> str:
    return controller_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_").lower()


def resolve_run(address: str, run: str) -> str:
    """A run's name; 'latest' is the newest of this controller."""
    if run != "latest":
        return run
    runs = list_runs(address)
    if not runs:
        raise NotFound(f"relaxd at {address} has no run yet")
    return runs[0].run


def show_runs(address: str, output: Format) -> int:
    rows = []
    for run in list_runs(address):
        created = run.created_at.ToDatetime().isoformat(sep=" ", timespec="seconds")
        rows.append((run.run, state_name(run), run.head.number, run.total_steps, created, run.run_dir))
    print_table(output, ("run", "state", "step", "of", "created", "directory"), rows)
    return 0


def show_status(address: str, output: Format) -> int:
    runs = list_runs(address)
    if output == "json":
        print_json([_status(run) for run in runs])
        return 0
    for run in runs:
        print(numbers(run).replace(state_name(run), f"{run.run} {state_name(run)}", 1))
        print_columns(("metric", "value"), [(name, f"{value:.6g}") for name, value in sorted(run.metrics.items())])
        for reason, count in sorted(run.dropped.items()):
            print(f"  {count} groups dropped since one was trained: {reason}")
        for rollback in run.rollbacks:
            print(f"  rollback {rollback}")
        for wait in run.waits:
            print(f"  {wait}")
        if run.error:
            print(f"  error: {run.error}")
    return 0


def _status(run: controller_pb2.Run) -> dict[str, object]:
    return {
        "run": run.run,
        "state": state_name(run),
        "run_dir": run.run_dir,
        "version": f"{run.head.lineage}.{run.head.number}" if run.has_head else None,
        "step": run.head.number,
        "total_steps": run.total_steps,
        "metrics": dict(run.metrics),
        "dropped": dict(run.dropped),
        "rollbacks": list(run.rollbacks),
        "waits": list(run.waits),
        "error": run.error,
    }


def show_daemons(address: str, output: Format) -> int:
    stub = connect(address)
    response = call_with_retry(
        lambda s: stub.ListDaemons(controller_pb2.ListDaemonsRequest(), timeout=s),
        what=f"relaxd at {address}",
        deadline_seconds=CALL_SECONDS,
    )
    header = ("instance", "rank", "role", "term", "alive", "address", "metrics", "pid", "waits_for")
    rows = []
    for d in response.daemons:
        role = common_pb2.Role.Name(d.identity.role).removeprefix("ROLE_").lower()
        alive = d.alive if output == "json" else "yes" if d.alive else "no"
        row = (d.identity.instance, d.rank, role, d.term, alive, d.address, d.metrics_address, d.pid, d.waits_for)
        rows.append(row)
    print_table(output, header, rows)
    return 0


def stop(address: str, run: str) -> int:
    stub = connect(address)
    request = controller_pb2.StopRunRequest(run=resolve_run(address, run), request_id=uuid.uuid4().hex)
    response = call_with_retry(
        lambda s: stub.StopRun(request, timeout=s), what=f"relaxd at {address}", deadline_seconds=CALL_SECONDS
    )
    if response.run.state in FINAL:
        print(f"{response.run.run}: is {state_name(response.run)} already")
    else:
        print(f"{response.run.run}: ends after the step in flight")
    return 0


def create(address: str, path: Path, overrides: Sequence[str], run_dir: Path | None) -> int:
    """Prints the run's name: the daemons that serve it are started as NAME.actor and NAME.rollout-0."""
    stub = connect(address)
    recipe = load_recipe(path, overrides)
    request = controller_pb2.CreateRunRequest(
        request_id=uuid.uuid4().hex,
        recipe_toml=to_toml(recipe),
        run_dir=str(run_dir.resolve()) if run_dir is not None else "",
    )
    response = call_with_retry(
        lambda s: stub.CreateRun(request, timeout=s), what=f"relaxd at {address}", deadline_seconds=CREATE_SECONDS
    )
    print(response.run.run)
    return 0


def watch(address: str, run: str) -> int:
    """Exit code 0 if the run ended or was stopped, 1 if it failed."""
    stub = connect(address)
    name = resolve_run(address, run)
    newest = call_with_retry(
        lambda s: stub.GetRun(controller_pb2.GetRunRequest(run=name), timeout=s),
        what=f"relaxd at {address}",
        deadline_seconds=CALL_SECONDS,
    ).run
    with Progress(Console(), newest) as progress:
        while newest.state not in FINAL:
            newest = next_state(stub, newest, progress)
    if newest.state == controller_pb2.RUN_STATE_FAILED:
        print(f"{name} failed: {newest.error}", file=sys.stderr)
        return 1
    return 0


def next_state(
    stub: controller_pb2_grpc.ControllerServiceStub, newest: controller_pb2.Run, progress: Progress
) -> controller_pb2.Run:
    """Show the run until it has ended or the stream breaks."""
    try:
        for response in stub.WatchRun(controller_pb2.WatchRunRequest(run=newest.run), timeout=WATCH_SECONDS):
            newest = response.run
            progress.show(newest)
    except grpc.RpcError as rpc_error:
        error = from_rpc(rpc_error)
        if not isinstance(error, (Unavailable, DeadlineExceeded)):
            raise error from rpc_error
        progress.note("relaxd is away")
        time.sleep(1.0)
    return newest
