"""One reward subprocess: `python -m rollout_server.rewards.worker SPEC` scores the items that arrive on stdin."""

import ctypes
import os
import signal
import sys
from typing import TextIO

from relax_common.rows import RewardStatus
from rollout_server.rewards.outcome import RewardItem, RewardOutcome, interpret
from rollout_server.rewards.registry import UnknownReward, resolve_spec
from rollout_server.rewards.weighted import RewardFunction
from rollout_server.rewards.wire import decode_items, encode_outcome, encode_started

PR_SET_PDEATHSIG = 1
REASON_CHARACTERS = 300


def main(spec: str) -> int:
    _die_with_parent()
    answers = _claim_stdout()
    try:
        function = resolve_spec(spec)
    except UnknownReward as error:
        print(encode_started(str(error)), file=answers, flush=True)
        return 1
    print(encode_started(""), file=answers, flush=True)
    for line in sys.stdin:
        for item in decode_items(line):
            print(encode_outcome(score(function, item)), file=answers, flush=True)
    return 0


def score(function: RewardFunction, item: RewardItem) -> RewardOutcome:
    try:
        returned = function(item)
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything, and that is never a reward of 0
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:REASON_CHARACTERS]
        return RewardOutcome(RewardStatus.ERROR, reason=reason)
    return interpret(returned)


def _claim_stdout() -> TextIO:
    """Answers get the pipe for themselves: what a reward function prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    return answers


def _die_with_parent() -> None:
    """A server that is killed leaves no hung reward behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        sys.exit(1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
