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
from rich.table import Table

from relax.common.v1 import common_pb2
from relax.controller.v1 import controller_pb2, controller_pb2_grpc
from relax_common.errors import DeadlineExceeded, NotFound, Unavailable, from_rpc
from relax_common.recipe import load_recipe, to_toml
from relax_common.rpc.channels import call_with_retry, sync_channel
from relaxd.ctl.progress import Progress

ADDRESS_FILE = "relaxd.address"
CALL_SECONDS = 5.0
CREATE_SECONDS = 60.0
WATCH_SECONDS = 24 * 3600.0
FINAL = (controller_pb2.RUN_STATE_ENDED, controller_pb2.RUN_STATE_FAILED, controller_pb2.RUN_STATE_STOPPED)


def controller_address(given: str, runs_dir: Path) -> str:
    """--controller, else RELAX_CONTROLLER, else that of the newest run directory."""
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


def show_runs(address: str) -> int:
    table = Table("run", "state", "step", "of", "created", "directory")
    for run in list_runs(address):
        created = run.created_at.ToDatetime().isoformat(sep=" ", timespec="seconds")
        table.add_row(run.run, state_name(run), str(run.head.number), str(run.total_steps), created, run.run_dir)
    Console().print(table)
    return 0


def show_status(address: str) -> int:
    console = Console()
    for run in list_runs(address):
        console.print(f"[bold]{run.run}[/bold] {state_name(run)}, version {run.head.lineage}.{run.head.number}")
        table = Table("metric", "value")
        for name, value in sorted(run.metrics.items()):
            table.add_row(name, f"{value:.6g}")
        console.print(table)
        for wait in run.waits:
            console.print(f"  {wait}")
        if run.error:
            console.print(f"[red]{run.error}[/red]")
    return 0


def show_daemons(address: str) -> int:
    stub = connect(address)
    response = call_with_retry(
        lambda s: stub.ListDaemons(controller_pb2.ListDaemonsRequest(), timeout=s),
        what=f"relaxd at {address}",
        deadline_seconds=CALL_SECONDS,
    )
    table = Table("instance", "rank", "role", "term", "alive", "address", "metrics", "pid", "waits for")
    for d in response.daemons:
        role = common_pb2.Role.Name(d.identity.role).removeprefix("ROLE_").lower()
        alive = "yes" if d.alive else "no"
        row = (d.identity.instance, d.rank, role, d.term, alive, d.address, d.metrics_address, d.pid, d.waits_for)
        table.add_row(*map(str, row))
    Console().print(table)
    return 0


def stop(address: str, run: str) -> int:
    stub = connect(address)
    request = controller_pb2.StopRunRequest(run=run, request_id=uuid.uuid4().hex)
    call_with_retry(
        lambda s: stub.StopRun(request, timeout=s), what=f"relaxd at {address}", deadline_seconds=CALL_SECONDS
    )
    print(f"{run}: ends after the step in flight")
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
    """0 where the run ended or was stopped, 1 where it failed."""
    stub = connect(address)
    newest = controller_pb2.Run(run=run)
    while newest.state not in FINAL:
        newest = next_state(stub, run, newest)
    if newest.state == controller_pb2.RUN_STATE_FAILED:
        print(f"{run} failed: {newest.error}", file=sys.stderr)
        return 1
    return 0


def next_state(
    stub: controller_pb2_grpc.ControllerServiceStub, run: str, newest: controller_pb2.Run
) -> controller_pb2.Run:
    """Show the run until it has ended or the stream breaks."""
    with Progress(Console(), newest) as progress:
        try:
            for response in stub.WatchRun(controller_pb2.WatchRunRequest(run=run), timeout=WATCH_SECONDS):
                newest = response.run
                progress.show(newest)
        except grpc.RpcError as rpc_error:
            error = from_rpc(rpc_error)
            if not isinstance(error, (Unavailable, DeadlineExceeded)):
                raise error from rpc_error
            progress.note("relaxd is away")
            time.sleep(1.0)
    return newest
