"""One reward subprocess: `python -m rollout_server.rewards.worker QUESTIONS_FD ANSWERS_FD PARENT_PID SPEC`."""

import ctypes
import os
import sys

from relax_common.process.tuning import end_with_parent
from relax_common.rows import RewardStatus
from rollout_server.rewards.outcome import RewardItem, RewardOutcome, interpret
from rollout_server.rewards.registry import RewardFunction, UnknownReward, resolve_spec
from rollout_server.rewards.wire import decode_questions, encode_outcome, encode_started

PR_SET_CHILD_SUBREAPER = 36
REASON_CHARACTERS = 300


def main(questions_fd: int, answers_fd: int, parent_pid: int, spec: str) -> int:
    end_with_parent(parent_pid)
    _adopt_orphans()
    # What a reward prints is for the log, and what it starts gets neither pipe.
    os.dup2(2, 1)
    for descriptor in (questions_fd, answers_fd):
        os.set_inheritable(descriptor, False)
    questions, answers = os.fdopen(questions_fd, encoding="ascii"), os.fdopen(answers_fd, "w", encoding="ascii")
    try:
        function = resolve_spec(spec)
    except UnknownReward as error:
        print(encode_started(str(error)), file=answers, flush=True)
        return 1
    print(encode_started(""), file=answers, flush=True)
    for line in questions:
        for question in decode_questions(line):
            print(encode_outcome(question.nonce, score(function, question.item)), file=answers, flush=True)
    return 0


def score(function: RewardFunction, item: RewardItem) -> RewardOutcome:
    try:
        return interpret(function(item))
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything, and that is never a reward of 0
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:REASON_CHARACTERS]
        return RewardOutcome(RewardStatus.ERROR, reason=reason)


def _adopt_orphans() -> None:
    """Descendants whose own parent has ended become children of this process, so that the server finds them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
