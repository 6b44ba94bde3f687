"""`relaxctl queue` against a real queue: what a person sees."""

import json
import re
from typing import Any

import pytest

from relaxd.ctl.main import main


def ask(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_status_inspect_and_watch_show_a_run(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench.begin(groups=4)
    first, second = bench.lease(2)
    bench.complete(first)
    queue = ("queue", "--queue", bench.queue.address)
    text = ask(capsys, *queue, "status", bench.run)
    assert f"{bench.run} open, version 0.0, durability metadata" in text
    for row in (r"pending\W+2", r"leased\W+1", r"ready\W+1", r"s\W+0\.0", r"oldest lease: \d"):
        assert re.search(row, text), (row, text)
    bench.complete(second)
    text = ask(capsys, *queue, "status", bench.run)
    assert "train/0" in text
    assert "closed" in text
    text = ask(capsys, *queue, "inspect", bench.run, "g1")
    assert "planned" in text
    assert "0.0, 1.0" in text
    assert "log_probs" in text
    closing = bench.client.get_plan("actor", 1, 0, 0, 1).close
    bench.dcs.commit(1, closing.groups, closing.plan_digest)
    bench.dcs.snapshot(1)
    while bench.client.partitions():
        pass
    assert "forgotten: its end is final" in ask(capsys, *queue, "inspect", bench.run, "g1")
    bench.client.end()
    lines = ask(capsys, *queue, "watch", bench.run, "--after", "5").splitlines()
    kinds = [line.split()[3] for line in lines]
    assert lines[0].split()[0] == "6", "only what comes after revision 5"
    assert kinds[-1] == "run_state"
    assert "leased" in kinds
    assert "server=s" in next(line for line in lines if " leased " in line)


def test_scripts_read_the_same_as_json(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench.begin(groups=4)
    first, _ = bench.lease(2)
    bench.complete(first)
    queue = ("queue", "--queue", bench.queue.address)
    [status] = json.loads(ask(capsys, *queue, "status", bench.run, "-o", "json"))
    assert (status["run"], status["state"], status["version"]) == (bench.run, "open", "0.0")
    assert {s: n for s, n in status["groups"].items() if n} == {
        "offered": 4, "admitted": 2, "pending": 2, "leased": 1, "ready": 1,
    }  # fmt: skip
    assert status["bytes"]["held"] > 0
    assert status["confirmed"] == {"s": "0.0"}
    assert status["waits"] == []
    group = json.loads(ask(capsys, *queue, "inspect", bench.run, first.group.group, "-o", "json"))
    assert (group["state"], group["attempts"]) == ("ready", 1)
    assert group["rows"] == [{"sample": 0, "segment": 0}, {"sample": 1, "segment": 0}]
    assert "log_probs" in group["fields"]
    bench.client.end()
    lines = ask(capsys, *queue, "watch", bench.run, "-o", "json").splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["revision"] for event in events] == sorted(event["revision"] for event in events)
    assert events[-1]["kind"] == "run_state"
    assert events[-1]["detail"] == {"state": "ended"}
    assert sum(event["kind"] == "returned" for event in events) == 4


def test_a_run_that_is_not_open_is_one_clear_line(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["queue", "--queue", bench.queue.address, "status", "nothing"])
    assert ended.value.code == 1
    assert "relaxctl: run 'nothing' is not open at this queue" in capsys.readouterr().err
