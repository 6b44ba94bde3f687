"""What commands print and write, without a daemon."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from rich.console import Console

from relax.common.v1 import common_pb2
from relax.controller.v1 import controller_pb2
from relax_common.errors import Precondition
from relax_common.recipe import load_recipe
from relaxd.ctl.main import main
from relaxd.ctl.output import print_table
from relaxd.ctl.progress import Progress
from relaxd.ctl.run import check_can_go_on, ignored_edits, new_run_dir
from relaxd.ctl.views import show_status

REPOSITORY = Path(__file__).parents[3]
ADDRESS = "a-host-with-a-rather-long-name.cluster.example.org:65535"


def test_two_runs_in_one_second_get_two_folders(tmp_path: Path) -> None:
    with patch("time.strftime", return_value="20260101-000000"):
        folders = [new_run_dir(tmp_path, "r") for _ in range(3)]
    assert [folder.name for folder in folders] == [
        "r-20260101-000000",
        "r-20260101-000000-2",
        "r-20260101-000000-3",
    ]


def test_an_address_is_never_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = [("quickstart-20260101-000000.rollout-0", 0, ADDRESS, ADDRESS, "")]
    print_table("text", ("instance", "rank", "address", "metrics", "waits_for"), rows)
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split() == ["quickstart-20260101-000000.rollout-0", "0", ADDRESS, ADDRESS, "-"]
    print_table("json", ("instance", "rank", "address", "metrics", "waits_for"), rows)
    assert json.loads(capsys.readouterr().out)[0]["address"] == ADDRESS


def run_in(state: str, step: int, *waits: str, rollbacks: tuple[str, ...] = ()) -> controller_pb2.Run:
    return controller_pb2.Run(
        run="r",
        state=controller_pb2.RunState.Value(f"RUN_STATE_{state}"),
        has_head=True,
        head=common_pb2.PolicyVersion(lineage=0, number=step),
        total_steps=9,
        waits=waits,
        rollbacks=rollbacks,
    )


def lines_of(*runs: controller_pb2.Run) -> list[str]:
    output = io.StringIO()
    with Progress(Console(file=output, width=80), runs[0]) as progress:
        for run in runs:
            progress.show(run)
    return output.getvalue().splitlines()


def test_in_a_pipe_progress_is_a_line_when_a_step_ends_or_the_reason_of_a_wait_changes() -> None:
    lines = lines_of(
        run_in("RUNNING", 1),
        run_in("RUNNING", 1, "actor waits 1.0 s for rows of step 1"),
        run_in("RUNNING", 1, "actor waits 31.5 s for rows of step 1"),
        run_in("RUNNING", 1),
        run_in("RUNNING", 2),
        run_in("RUNNING", 2, "relaxd waits for room on the disk to write events.jsonl"),
        run_in("ENDED", 2),
    )
    assert [re.sub("version.*", "", line.replace("  ", " ")).strip() for line in lines] == [
        "running step 1/9",
        "running step 1/9",
        "running step 2/9",
        "running step 2/9",
        "ended step 2/9",
    ]
    assert "rows of step 1" in lines[1]
    assert "room on the disk" in lines[3]


def test_each_rollback_is_told_once_and_counted_on_the_line() -> None:
    told = "from version 0.5 back to 1.3, 2 steps are repeated: rows and plan of step 3 are gone"
    lines = lines_of(
        run_in("RUNNING", 5), run_in("RUNNING", 3, rollbacks=(told,)), run_in("RUNNING", 4, rollbacks=(told,))
    )
    assert lines[1] == f"rollback: {told}"
    assert [line for line in lines if "rollback:" in line] == [f"rollback: {told}"]
    assert lines[-1].endswith("1 rollback")


@pytest.fixture
def folder_with_logs(tmp_path: Path) -> Path:
    logs = tmp_path / "runs" / "r" / "logs"
    logs.mkdir(parents=True)
    (logs.parent / "recipe.toml").touch()
    (logs / "queue.log").write_text("one\ntwo\nthree\n")
    return tmp_path / "runs"


def command(runs: Path, *words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["--runs-dir", str(runs), *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(("lines", "shown"), [("0", []), ("2", ["two", "three"]), ("99", ["one", "two", "three"])])
def test_logs_show_as_many_lines_as_were_asked_for(
    folder_with_logs: Path, capsys: pytest.CaptureFixture[str], lines: str, shown: list[str]
) -> None:
    assert command(folder_with_logs, "logs", "latest", "--lines", lines) == 0
    assert capsys.readouterr().out.splitlines() == ["== queue", *shown]


def test_a_reader_that_has_read_enough_is_no_error(folder_with_logs: Path) -> None:
    (folder_with_logs / "r" / "logs" / "queue.log").write_text("a line of a log\n" * 50_000)
    words = f"{sys.executable} -m relaxd.ctl.main --runs-dir {folder_with_logs} logs latest --lines 50000"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {words} | head -1"], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_negative_count_of_lines_is_a_wrong_usage(folder_with_logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(folder_with_logs, "logs", "latest", "--lines=-1") == 2
    assert "'-1' is not a count" in capsys.readouterr().err


def test_a_checkpoint_that_does_not_exist_is_named_with_those_that_do(
    folder_with_logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(folder_with_logs, "checkpoint", "pin", "latest", "9.9") == 1
    assert capsys.readouterr().err.strip().endswith("there are: none")


def test_a_run_that_left_nothing_to_go_on_from_is_refused_in_one_line(tmp_path: Path) -> None:
    recipe = load_recipe(REPOSITORY / "recipes/quickstart.toml")
    assert not recipe.checkpoint.every_steps
    run_dir = tmp_path / "r"
    copies = run_dir / "state/daemons/dcs/recovery/r"
    copies.mkdir(parents=True)
    (copies / "version-00000004.0.unfinished").touch()
    with pytest.raises(Precondition, match=r"run r cannot go on: .* no recovery copy .*; start it again") as refused:
        check_can_go_on(run_dir, recipe)
    assert "\n" not in refused.value.message
    (run_dir / "export").mkdir()
    (run_dir / "export/config.json").touch()
    with pytest.raises(Precondition, match=rf"it has ended: .* --set model.path={run_dir}/export"):
        check_can_go_on(run_dir, recipe)
    (copies / "version-00000004.0").touch()
    check_can_go_on(run_dir, recipe)


def test_status_tells_each_rollback_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    told = "from 0.5 to 1.4, 1 step undone: the actor and dcs were lost together"
    runs = [run_in("RUNNING", 4, "actor waits 2.0 s for rows of step 4", rollbacks=(told,))]
    with patch("relaxd.ctl.views.list_runs", return_value=runs):
        assert show_status("", "text") == 0
        text = capsys.readouterr().out.splitlines()
        assert show_status("", "json") == 0
    assert f"  rollback {told}" in text
    assert "  actor waits 2.0 s for rows of step 4" in text
    [status] = json.loads(capsys.readouterr().out)
    assert (status["run"], status["rollbacks"], status["waits"]) == ("r", [told], list(runs[0].waits))


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (("queue", "status", "latest"), ("status", "newest", "text")),
        (("queue", "inspect", "latest", "g"), ("inspect", "newest", "g", "text")),
        (("queue", "watch", "latest"), ("watch", "newest", 0, "text")),
        (("queue", "--queue", ADDRESS, "status", "latest"), ("status", "newest", "text")),
    ],
)
def test_latest_is_the_newest_run_of_the_controller(words: tuple[str, ...], asked: tuple[object, ...]) -> None:
    runs = [controller_pb2.Run(run=name) for name in ("newest", "older")]
    with (
        patch("relaxd.ctl.views.list_runs", return_value=runs),
        patch("relaxd.ctl.queue.queue_address", return_value=ADDRESS),
        patch("relaxd.ctl.queue.QueueView") as view,
        pytest.raises(SystemExit),
    ):
        main(["--controller", ADDRESS, *words])
    view.assert_called_once_with(ADDRESS)
    [(question, arguments, _)] = view.return_value.method_calls
    assert (question, *arguments) == asked


def test_edits_of_a_runs_recipe_that_have_no_effect_are_told() -> None:
    recipe = REPOSITORY / "recipes" / "quickstart.toml"
    known = load_recipe(recipe, ["total_steps=9"])
    assert ignored_edits(known, load_recipe(recipe, ["total_steps=12"])) == []
    (told,) = ignored_edits(known, load_recipe(recipe, ["total_steps=12", "seed=77"]))
    assert "edited in seed: ignored" in told
    (told,) = ignored_edits(known, load_recipe(recipe, ["total_steps=5"]))
    assert "edited in total_steps: ignored" in told
