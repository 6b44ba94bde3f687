"""`relaxctl run`: starts a controller for one run and watches it until the run has ended."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
from rich.console import Console

from relax.controller.v1 import controller_pb2, controller_pb2_grpc
from relax_common.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidInput,
    Precondition,
    RelaxError,
    RunEnded,
    Unavailable,
    from_rpc,
)
from relax_common.recipe import Recipe, load_recipe, parse_recipe, to_toml
from relax_common.rpc.channels import call_with_retry, sync_channel
from relax_common.storage.checkpoint_folder import version_of
from relaxd.ctl.dry_run import introduce
from relaxd.ctl.progress import Progress
from relaxd.ctl.relaxd_process import RelaxdProcess
from relaxd.ctl.views import FINAL, WATCH_SECONDS
from relaxd.plan.checks import check_launch, check_recipe, count_gpus
from relaxd.plan.code_names import code_names

START_SECONDS = 60.0
STOP_CALL_SECONDS = 10.0
SILENCE_SECONDS = 60.0
"""A relaxd that is alive but does not answer for this long is replaced."""
Stub = controller_pb2_grpc.ControllerServiceStub


def run_recipe(path: Path, overrides: Sequence[str], *, runs_dir: Path) -> int:
    """0 when the run ended well; 1 when it failed; 130 after a second Ctrl-C."""
    console = Console()
    recipe = load_recipe(path, overrides)
    derived, prompts = check_recipe(recipe)
    check_launch(recipe, count_gpus() if recipe.placement.gpus_per_host else 0)
    introduce(recipe, derived, prompts.line(), console)
    run_dir = new_run_dir(runs_dir, recipe.name)
    console.print(f"run directory {run_dir}", soft_wrap=True)
    return _supervised(run_dir, recipe, console, lambda stub: _create(stub, recipe, run_dir))


def new_run_dir(runs_dir: Path, name: str) -> Path:
    """A new folder, named by the time; two runs that start in the same second get different folders."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for count in range(1, 1000):
        folder = (runs_dir / (stem if count == 1 else f"{stem}-{count}")).resolve()
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise InvalidInput(f"run directory {folder}: {error.strerror}") from error
        return folder
    raise AlreadyExists(f"no free name for a run directory {stem} below {runs_dir}")


def resume(run_dir: Path, *, accept_changed_data: bool = False) -> int:
    """Continues a run that was stopped, has failed, or lost all its daemons at once."""
    console = Console()
    recipe, run_dir = load_recipe(run_dir / "recipe.toml"), run_dir.resolve()
    check_can_go_on(run_dir, recipe)
    return _supervised(
        run_dir, recipe, console, lambda stub: _resume(stub, run_dir.name, recipe, console, accept_changed_data)
    )


def check_can_go_on(run_dir: Path, recipe: Recipe) -> None:
    """Raises Precondition if the run would begin again at version 0: it keeps no checkpoints, and the state directory
    of its dcs has no recovery copy."""
    copies = run_dir.glob(f"state/daemons/*/recovery/{run_dir.name}/*")
    if recipe.checkpoint.every_steps or any(version_of(path.name) for path in copies):
        return
    export = run_dir / "export"
    advice = "start it again with `relaxctl run`, and set checkpoint.every_steps for long runs"
    if (export / "config.json").exists():
        advice = f"it has ended: a new run begins with its weights by --set model.path={export}"
    raise Precondition(
        f"run {run_dir.name} cannot go on: it keeps no checkpoints (checkpoint.every_steps = 0), and dcs has no "
        f"recovery copy of it on disk; {advice}"
    )


def _supervised(run_dir: Path, recipe: Recipe, console: Console, start: Callable[[Stub], controller_pb2.Run]) -> int:
    relaxd = RelaxdProcess(run_dir, code_names(recipe))
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


def _resume(stub: Stub, run: str, edited: Recipe, console: Console, accept_changed_data: bool) -> controller_pb2.Run:
    known: controller_pb2.Run = call_with_retry(
        lambda s: stub.GetRun(controller_pb2.GetRunRequest(run=run), timeout=s),
        what="relaxd to start",
        deadline_seconds=START_SECONDS,
    ).run
    longer = edited.total_steps if edited.total_steps > known.total_steps else 0
    for line in ignored_edits(parse_recipe(known.recipe_toml), edited):
        console.print(line, style="yellow", highlight=False, soft_wrap=True)
    if known.state == controller_pb2.RUN_STATE_ENDED:
        if longer:
            raise RunEnded(
                f"run {run} has ended after all its {known.total_steps} steps and cannot grow any more; "
                f"start a new one from its export with --set model.path={known.run_dir}/export"
            )
        console.print(f"nothing is left to do: all {known.total_steps} steps are done")
        return known
    if longer:
        console.print(f"the run is lengthened from {known.total_steps} to {longer} steps", highlight=False)
    console.print(f"going on from version {known.head.lineage}.{known.head.number}, or from the newest state on disk")
    request = controller_pb2.ResumeRunRequest(run=run, total_steps=longer, accept_changed_data=accept_changed_data)
    response: controller_pb2.ResumeRunResponse = call_with_retry(
        lambda s: stub.ResumeRun(request, timeout=s),
        what=f"relaxd to go on with {run}",
        deadline_seconds=START_SECONDS,
    )
    return response.run


def ignored_edits(known: Recipe, edited: Recipe) -> list[str]:
    """Changes in a run's recipe.toml that have no effect. Only a larger total_steps has one."""
    before, after = known.model_dump(), edited.model_dump()
    if edited.total_steps > known.total_steps:
        before.pop("total_steps")
    keys = [key for key in before if before[key] != after[key]]
    if not keys:
        return []
    return [
        f"recipe.toml was edited in {', '.join(keys)}: ignored, a run keeps its recipe; only a larger total_steps "
        "takes effect"
    ]


def _watch(relaxd: RelaxdProcess, start: Callable[[Stub], controller_pb2.Run], run_dir: Path, console: Console) -> int:
    with sync_channel(relaxd.address) as channel:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        try:
            run = start(stub)
        except DeadlineExceeded as error:
            raise RelaxError(relaxd.failure or f"{error.message}; its log ends with: {relaxd.last_words}") from error
        asked_to_stop = False
        with Progress(console, run) as progress:
            watched = _Watched(stub, relaxd, run, progress)
            while watched.run.state not in FINAL:
                try:
                    watched.follow()
                except KeyboardInterrupt:
                    if asked_to_stop:
                        raise
                    asked_to_stop = True
                    console.print("ending after the step in flight; Ctrl-C again to leave at once")
                    _ask_to_stop(stub, run.run)
        return _closing_words(watched.run, run_dir, console)


def _ask_to_stop(stub: controller_pb2_grpc.ControllerServiceStub, run: str) -> None:
    request = controller_pb2.StopRunRequest(run=run, request_id=uuid.uuid4().hex)
    call_with_retry(
        lambda s: stub.StopRun(request, timeout=s), what="relaxd to stop the run", deadline_seconds=STOP_CALL_SECONDS
    )


class _Watched:
    """The newest state of a run that was seen; it survives the deaths of relaxd."""

    def __init__(
        self,
        stub: controller_pb2_grpc.ControllerServiceStub,
        relaxd: RelaxdProcess,
        run: controller_pb2.Run,
        progress: Progress,
    ) -> None:
        self.run = run
        self._stub = stub
        self._relaxd = relaxd
        self._progress = progress
        self._heard_at = time.monotonic()

    def follow(self) -> None:
        """Watch until the run has ended or the stream breaks. Raises RelaxError once relaxd has been given up."""
        try:
            for response in self._stub.WatchRun(
                controller_pb2.WatchRunRequest(run=self.run.run), timeout=WATCH_SECONDS
            ):
                self._heard(response.run)
        except grpc.RpcError as rpc_error:
            error = from_rpc(rpc_error)
            if self._relaxd.failure:
                raise RelaxError(self._relaxd.failure) from rpc_error
            if not isinstance(error, (Unavailable, DeadlineExceeded)):
                raise error from rpc_error
            self._progress.note("relaxd is away; it is being restarted")
            if time.monotonic() - self._heard_at > SILENCE_SECONDS:
                self._heard_at = time.monotonic()
                self._relaxd.replace()
            time.sleep(0.3)

    def _heard(self, run: controller_pb2.Run) -> None:
        self._heard_at = time.monotonic()
        self.run = run
        self._progress.show(run)


def _closing_words(run: controller_pb2.Run, run_dir: Path, console: Console) -> int:
    if run.state == controller_pb2.RUN_STATE_FAILED:
        console.print(f"run failed: {run.error}", style="red", highlight=False, soft_wrap=True, markup=False)
        console.print(f"logs are in {run_dir / 'logs'}", soft_wrap=True)
        return 1
    if run.state == controller_pb2.RUN_STATE_STOPPED:
        console.print(f"stopped at version {run.head.lineage}.{run.head.number}; `relaxctl resume {run.run}` goes on")
        return 0
    summary = json.loads((run_dir / "summary.json").read_text())
    console.print(
        f"[bold]{summary['steps']} steps[/bold] in {summary['wall_seconds']:.0f} s: {_rewards(summary)}, "
        f"staleness up to {summary['max_staleness_seen']}, {summary['tokens_per_second']:.0f} tokens/s",
        soft_wrap=True,
    )
    for line in summary["rollbacks"]:
        console.print(f"rollback {line}", style="yellow", highlight=False, soft_wrap=True, markup=False)
    console.print(f"report  {run_dir / 'report.html'}", soft_wrap=True)
    console.print(f"weights {run_dir / 'export'}", soft_wrap=True)
    if summary["ledger_faults"]:
        console.print(f"[red]ledger[/red] {len(summary['ledger_faults'])} faults; see `relaxctl ledger {run_dir.name}`")
        return 1
    return 0


def _rewards(summary: dict[str, float]) -> str:
    window = summary["reward_window"]
    if not window:
        return f"reward {summary['reward_last']:.3f}"
    first, last = ("first step", "last") if window == 1 else (f"first {window} steps", f"last {window}")
    return f"reward {summary['reward_first']:.3f} ({first}) -> {summary['reward_last']:.3f} ({last})"
