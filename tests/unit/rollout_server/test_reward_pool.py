import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from relax_common.rows import RewardStatus
from rollout_server.rewards.outcome import RewardItem
from rollout_server.rewards.pool import RewardPool
from rollout_server.rewards.process import RewardWorkerError

WAIT_SECONDS = 30.0


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardPool]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    made = RewardPool("reward_samples:obey", workers=2, deadline_seconds=1.0)
    yield made
    made.close()


def statuses(pool: RewardPool, responses: list[str]) -> list[str]:
    outcomes = pool.score([RewardItem("", each, None, {}) for each in responses]).result(WAIT_SECONDS)
    return [outcome.status.name for outcome in outcomes]


def test_I11_each_failure_is_a_status_of_its_own_sample(pool: RewardPool) -> None:
    responses = ["fine", "raise", "fine", "hang", "exit", "none", "sys.exit", "print", "fine"]
    assert statuses(pool, responses) == ["OK", "ERROR", "OK", "TIMEOUT", "ERROR", "INVALID", "ERROR", "OK", "OK"]


def test_hung_workers_are_replaced_and_the_next_round_is_fast(pool: RewardPool) -> None:
    started = time.monotonic()
    assert statuses(pool, ["fine"] * 13 + ["hang", "hang with a child"]) == ["OK"] * 13 + ["TIMEOUT"] * 2
    assert time.monotonic() - started < 6.0
    statuses(pool, ["fine"])
    started = time.monotonic()
    assert statuses(pool, ["fine"] * 16) == ["OK"] * 16
    assert time.monotonic() - started < 1.0


def test_a_few_hung_samples_take_about_one_deadline_and_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    monkeypatch.setattr("rollout_server.rewards.process.SLOW_SECONDS", 0.3)
    pool = RewardPool("reward_samples:obey", workers=1, deadline_seconds=3.0)
    started = time.monotonic()
    assert statuses(pool, ["fine", "hang", "hang", "hang", "fine"]) == ["OK", *["TIMEOUT"] * 3, "OK"]
    assert time.monotonic() - started < 3 * 3.0, "one deadline each"
    assert statuses(pool, ["slow", "fine"]) == ["OK", "OK"]
    pool.close()


def test_mathematics_is_graded_in_workers_in_order_whatever_is_among_it() -> None:
    pool = RewardPool("math", workers=1, deadline_seconds=20.0)
    answers = ["264", "no idea", "", "5", "264", "(10^{8})!", "9^{9^{9^{9}}}", r"\int_0^{3}\sin(x^{x^{x}})dx"]
    labels = ["264", "264", "5", "5", "9", "3", "3", "3"]
    items = [
        RewardItem("", rf"\boxed{{{answer}}}" if answer and answer[0] != "n" else answer, label, {})
        for answer, label in zip(answers, labels, strict=True)
    ]
    outcomes = pool.score([*items, RewardItem("", "4", None, {})]).result(WAIT_SECONDS)
    assert [each.value for each in outcomes] == [1, 0, 0, 1, 0, 0, 0, 0, 0]
    assert [each.status.name for each in outcomes] == ["OK"] * 8 + ["ERROR"]
    pool.close()


@pytest.mark.parametrize(
    "response",
    ["write to every descriptor", "forge an answer to every descriptor", "answer without an end"],
)
def test_a_pipe_that_carries_something_else_costs_its_sample_and_the_worker(pool: RewardPool, response: str) -> None:
    for _ in range(3):
        assert statuses(pool, ["fine", response, "fine"]) == ["OK", "ERROR", "OK"]


def test_programs_that_a_reward_starts_hold_neither_pipe(pool: RewardPool) -> None:
    items = [RewardItem("", each, None, {}) for each in ("read the standard input", "descriptors of a child")]
    read, held = (each.value for each in pool.score(items).result(WAIT_SECONDS))
    assert read == 0.0
    assert held == 4.0, "its three standard streams and the folder that it lists"


def test_an_orphan_of_a_hung_reward_ends_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    pool = RewardPool("reward_samples:obey", workers=1, deadline_seconds=6.0)
    assert statuses(pool, [f"leave an orphan in {tmp_path / 'pid'}"]) == ["TIMEOUT"]
    orphan = int((tmp_path / "pid").read_text())
    end = time.monotonic() + WAIT_SECONDS
    while psutil.pid_exists(orphan) and psutil.Process(orphan).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "it lives on"
        time.sleep(0.05)
    pool.close()


@pytest.mark.parametrize(
    ("response", "status"),
    [
        ("reward 3.4e38", "OK"),
        ("reward 3.5e38", "INVALID"),
        ("reward -1e300", "INVALID"),
        ("reward inf", "INVALID"),
        ("reward nan", "INVALID"),
        ("many digits", "INVALID"),
    ],
)
def test_a_reward_that_the_column_cannot_hold_is_a_status(pool: RewardPool, response: str, status: str) -> None:
    assert statuses(pool, [response, "fine"]) == [status, "OK"]


def test_workers_are_reused_and_do_not_load_torch(pool: RewardPool) -> None:
    items = [RewardItem("", "pid", None, {})]
    pids = {pool.score(items).result(WAIT_SECONDS)[0].value for _ in range(20)}
    assert len(pids) <= 2
    assert pool.score([RewardItem("", "torch?", None, {})]).result(WAIT_SECONDS)[0].value == 0.0


def test_parts_and_reasons_come_back(pool: RewardPool) -> None:
    items = [RewardItem("", each, None, {}) for each in ("parts", "raise", "hang")]
    parts, error, timeout = pool.score(items).result(WAIT_SECONDS)
    assert parts.parts == {"format": 0.5}
    assert error.reason == "KeyError: 'missing thing'"
    assert timeout.reason == "no reward within 1.0 s"
    assert timeout.status is RewardStatus.TIMEOUT


def test_a_waiter_that_goes_away_costs_no_worker(pool: RewardPool) -> None:
    """Its result was refused by the cancelled future, and the worker's thread ended with that error."""
    for _ in range(3):
        pool.score([RewardItem("", "1", None, {})]).cancel()
    assert statuses(pool, ["1"] * 4) == ["OK"] * 4


def test_nothing_to_score_is_no_wait(pool: RewardPool) -> None:
    assert pool.score([]).result(0) == []


def test_a_reward_that_cannot_load_fails_at_the_start() -> None:
    with pytest.raises(RewardWorkerError, match="did you mean 'exact'"):
        RewardPool("exat", workers=1, deadline_seconds=1.0)


def test_reward_code_is_light() -> None:
    import subprocess

    code = "import sys, rollout_server.rewards.worker; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
