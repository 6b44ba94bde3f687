"""`relaxctl queue` against a real queue: what a person sees."""

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
    assert lines[0].split()[0] == "6", "only what is behind revision 5"
    assert kinds[-1] == "run_state"
    assert "leased" in kinds
    assert "server=s" in next(line for line in lines if " leased " in line)


def test_a_run_that_is_not_open_is_one_clear_line(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["queue", "--queue", bench.queue.address, "status", "nothing"])
    assert ended.value.code == 1
    assert "relaxctl: run 'nothing' is not open at this queue" in capsys.readouterr().err
