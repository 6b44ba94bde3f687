"""`relaxctl run`: a controller of its own for one run, watched until the run has ended.

relaxd is started as a subprocess and started again, on the same port and state, if it dies: the run goes on.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
from rich.console import Console

from relax.controller.v1 import controller_pb2, controller_pb2_grpc
from relax_common.errors import DeadlineExceeded, Precondition, RelaxError, Unavailable, from_rpc
from relax_common.process.ports import keepable_port
from relax_common.recipe import Recipe, load_recipe, to_toml
from relax_common.rpc.channels import call_with_retry, sync_channel
from relaxd.ctl.dry_run import introduce
from relaxd.ctl.progress import Progress
from relaxd.ctl.views import ADDRESS_FILE, FINAL, WATCH_SECONDS
from relaxd.launch.local import last_line
from relaxd.plan.checks import check_launch, check_recipe, count_gpus
from relaxd.plan.code_names import code_names

START_SECONDS = 30.0
STOP_SECONDS = 60.0
_RELAXD_RESTARTS_MAX = 5
Stub = controller_pb2_grpc.ControllerServiceStub


def run_recipe(path: Path, overrides: Sequence[str], *, runs_dir: Path) -> int:
    """0 when the run ended well; 1 when it failed; 130 after a second Ctrl-C."""
    console = Console()
    recipe = load_recipe(path, overrides)
    derived, prompts = check_recipe(recipe)
    check_launch(recipe, count_gpus() if recipe.placement.gpus_per_host else 0)
    introduce(recipe, derived, prompts.line(), console)
    run_dir = (runs_dir / f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    run_dir.mkdir(parents=True)
    console.print(f"run directory {run_dir}")
    return _supervised(run_dir, recipe, console, lambda stub: _create(stub, recipe, run_dir))


def resume(run_dir: Path) -> int:
    """Goes on with a run that was stopped, has failed, or lost all its daemons at once."""
    console = Console()
    recipe = load_recipe(run_dir / "recipe.toml")
    if not recipe.checkpoint.every_steps:
        raise Precondition(f"run {run_dir.name} keeps no checkpoints (checkpoint.every_steps = 0), so none can go on")
    return _supervised(run_dir.resolve(), recipe, console, lambda stub: _resume(stub, run_dir.name, console))


def _supervised(run_dir: Path, recipe: Recipe, console: Console, start: Callable[[Stub], controller_pb2.Run]) -> int:
    relaxd = RelaxdProcess(run_dir, recipe)
    try:
        return _watch(relaxd, start, run_dir, console)
    finally:
        relaxd.stop()


def _create(stub: Stub, recipe: Recipe, run_dir: Path) -> controller_pb2.Run:
    request = controller_pb2.CreateRunRequest(
        request_id=uuid.uuid4().hex, recipe_toml=to_toml(recipe), run_dir=str(run_dir)
    )
    response: controller_pb2.CreateRunResponse = call_with_retry(
        lambda s: stub.CreateRun(request, timeout=s), what="relaxd to start", deadline_seconds=START_SECONDS
    )
    return response.run


def _resume(stub: Stub, run: str, console: Console) -> controller_pb2.Run:
    known: controller_pb2.Run = call_with_retry(
        lambda s: stub.GetRun(controller_pb2.GetRunRequest(run=run), timeout=s),
        what="relaxd to start",
        deadline_seconds=START_SECONDS,
    ).run
    if known.state == controller_pb2.RUN_STATE_ENDED:
        console.print(f"nothing is left to do: all {known.total_steps} steps are done")
        return known
    console.print(f"going on from version {known.head.lineage}.{known.head.number} or the newest checkpoint before it")
    response: controller_pb2.ResumeRunResponse = call_with_retry(
        lambda s: stub.ResumeRun(controller_pb2.ResumeRunRequest(run=run), timeout=s),
        what=f"relaxd to go on with {run}",
        deadline_seconds=START_SECONDS,
    )
    return response.run


class RelaxdProcess:
    """relaxd under supervision of this command."""

    def __init__(self, run_dir: Path, recipe: Recipe) -> None:
        self._names = code_names(recipe)
        self._run_dir = run_dir
        self._log_path = run_dir / "logs" / "relaxd.log"
        self._log_path.parent.mkdir(exist_ok=True)
        self.address = f"127.0.0.1:{keepable_port()}"
        self._stopping = threading.Event()
        self._popen = self._start()
        self.failure = ""
        self._keeper = threading.Thread(target=self._keep, name="keep-relaxd", daemon=True)
        self._keeper.start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "relaxd", "--listen", self.address),
                    *("--state-dir", str(self._run_dir / "state")),
                    *("--address-file", str(self._run_dir / ADDRESS_FILE)),
                    *("--allow-programs", ",".join(self._names.programs.values())),
                    *("--allow-imports", ",".join(self._names.imports.values())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _keep(self) -> None:
        restarts = 0
        while True:
            code = self._popen.wait()
            if self._stopping.is_set():
                return
            restarts += 1
            if restarts > _RELAXD_RESTARTS_MAX:
                self.failure = f"relaxd ended {restarts} times (exit {code}): {last_line(self._log_path)}"
                return
            time.sleep(0.2)
            self._popen = self._start()

    def stop(self) -> None:
        self._stopping.set()
        self._popen.send_signal(signal.SIGTERM)
        try:
            self._popen.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
        # Later commands must not look for a controller that has ended.
        (self._run_dir / ADDRESS_FILE).unlink(missing_ok=True)


def _watch(relaxd: RelaxdProcess, start: Callable[[Stub], controller_pb2.Run], run_dir: Path, console: Console) -> int:
    stub = controller_pb2_grpc.ControllerServiceStub(sync_channel(relaxd.address))
    run = start(stub)
    asked_to_stop = False
    with Progress(console, run) as progress:
        while run.state not in FINAL:
            try:
                run = _next_state(stub, relaxd, run.run, progress)
            except KeyboardInterrupt:
                if asked_to_stop:
                    raise
                asked_to_stop = True
                console.print("ending after the step in flight; Ctrl-C again to leave at once")
                _ask_to_stop(stub, run.run)
    return _closing_words(run, run_dir, console)


def _ask_to_stop(stub: controller_pb2_grpc.ControllerServiceStub, run: str) -> None:
    request = controller_pb2.StopRunRequest(run=run, request_id=uuid.uuid4().hex)
    call_with_retry(
        lambda s: stub.StopRun(request, timeout=s), what="relaxd to stop the run", deadline_seconds=START_SECONDS
    )


def _next_state(
    stub: controller_pb2_grpc.ControllerServiceStub, relaxd: RelaxdProcess, run: str, progress: Progress
) -> controller_pb2.Run:
    """Follow until the run has ended or the stream broke; returns the newest state seen."""
    newest = controller_pb2.Run(run=run)
    try:
        for response in stub.WatchRun(controller_pb2.WatchRunRequest(run=run), timeout=WATCH_SECONDS):
            newest = response.run
            progress.show(newest)
    except grpc.RpcError as rpc_error:
        error = from_rpc(rpc_error)
        if relaxd.failure:
            raise RelaxError(relaxd.failure) from rpc_error
        if not isinstance(error, (Unavailable, DeadlineExceeded)):
            raise error from rpc_error
        progress.note("relaxd is away; it is being restarted")
        time.sleep(0.3)
    return newest


def _closing_words(run: controller_pb2.Run, run_dir: Path, console: Console) -> int:
    if run.state == controller_pb2.RUN_STATE_FAILED:
        console.print(f"[red]run failed[/red]: {run.error}")
        console.print(f"logs are in {run_dir / 'logs'}")
        return 1
    if run.state == controller_pb2.RUN_STATE_STOPPED:
        console.print(f"stopped at version {run.head.lineage}.{run.head.number}; `relaxctl resume {run.run}` goes on")
        return 0
    summary = json.loads((run_dir / "summary.json").read_text())
    console.print(
        f"[bold]{summary['steps']} steps[/bold] in {summary['wall_seconds']:.0f} s: reward "
        f"{summary['first20_reward']:.3f} (first 20 steps) -> {summary['last20_reward']:.3f} (last 20), "
        f"staleness up to {summary['max_staleness_seen']}, {summary['tokens_per_second']:.0f} tokens/s"
    )
    console.print(f"report  {run_dir / 'report.html'}")
    console.print(f"weights {run_dir / 'export'}")
    if summary["ledger_faults"]:
        console.print(f"[red]ledger[/red] {len(summary['ledger_faults'])} faults; see `relaxctl ledger {run_dir.name}`")
        return 1
    return 0
