"""Commands that ask a controller."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from rich.console import Console
from rich.table import Table

from relax.common.v1 import common_pb2
from relax.controller.v1 import controller_pb2, controller_pb2_grpc
from relax_common.channels import call_with_retry, sync_channel
from relax_common.errors import NotFound

ADDRESS_FILE = "relaxd.address"
CALL_SECONDS = 5.0


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
